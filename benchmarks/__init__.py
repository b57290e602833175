"""Scripts that time and draw; `python -m benchmarks.NAME --help` from the repository root. See README.md."""
