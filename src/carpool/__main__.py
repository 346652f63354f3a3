"""`python -m carpool` is the `carpool` command."""

from carpool.cli import main

if __name__ == "__main__":
    main()
