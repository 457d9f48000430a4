"""Run the command line as `python -m kvflow.cli`."""

from kvflow.cli.main import main

if __name__ == "__main__":
    main()
