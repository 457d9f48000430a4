"""The matching actor: joins sources and registrations, and decides every retry, cancel, lease, deadline and loss."""
