"""Daguerre as a library: what `import daguerre` promises. docs/library.md is its page.

Settings of recipes and commands are given as on the command line, `key=value`: all pages speak of the same names.
"""
