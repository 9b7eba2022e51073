"""Entry point of `python -m triton_local`."""

from triton_local.cli import main

if __name__ == "__main__":
    main(prog_name="triton_local")
