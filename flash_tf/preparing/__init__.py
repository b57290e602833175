"""Text as windows on disk, made by a pipeline of Apache Beam; `docs/prepared.md` describes the result."""
