"""`python -m benchmarks.gpu`."""

from benchmarks.gpu.command import main

if __name__ == "__main__":
    main()
