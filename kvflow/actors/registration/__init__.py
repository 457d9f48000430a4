"""The registration actor: the front door that checks what target engines ask for."""
