"""`python -m relaxion`: the command, where its script is not on the path."""

from relaxion.apps.cli.app import main

if __name__ == "__main__":
    main()
