"""Tells griffe, which reads docstrings for the API pages, what our section titles are called in its own terms."""

import griffe

SECTIONS = {"Example:": "Examples:", "Call arguments:": "Other Parameters: Call arguments"}


class Sections(griffe.Extension):
    """Renames the titles of sections, line by line."""

    def on_object(self, *, obj, **kwargs):
        """Rewrites the docstring of one module, class or function."""
        del kwargs
        if obj.docstring:
            lines = obj.docstring.value.splitlines()
            obj.docstring.value = "\n".join(SECTIONS.get(line, line) for line in lines)
