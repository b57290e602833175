"""Packaging of flash-tf: all of it stands in pyproject.toml."""

from setuptools import setup

setup()
