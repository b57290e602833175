"""Renames our docstring sections for griffe, which reads docstrings for the API pages."""

import griffe

SECTIONS = {"Example:": "Examples:", "Call arguments:": "Other Parameters: Call arguments"}


class Sections(griffe.Extension):
    """Renames section titles, line by line."""

    def on_object(self, *, obj, **kwargs):
        """Rewrites the docstring of one module, class or function."""
        del kwargs
        if obj.docstring:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join(SECTIONS.get(line, line) for line in lines)
