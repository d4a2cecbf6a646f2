"""`python -m drafttrain VERB` is the same as the console command `drafttrain VERB`."""

from drafttrain.cli import main

if __name__ == "__main__":
    main()
