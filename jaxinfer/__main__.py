"""``python -m jaxinfer``: the command line where its script is not on the path."""

from jaxinfer.cli.main import main

if __name__ == "__main__":
    main("python -m jaxinfer")
