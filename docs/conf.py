"""How `make docs` builds these pages into one site: Sphinx, with Markdown by MyST and the theme Furo."""

from docutils import nodes

from daguerre import __version__

project = "Daguerre"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"Daguerre {__version__}"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_use_index = False  # no page leads to an index of names, and on a phone it does not fit
html_domain_indices = False
myst_heading_anchors = 3  # as GitHub names them
default_role = "code"  # docstrings are Markdown: `name` is code
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "no-value": True}
autodoc_class_signature = "separated"  # fields stand below, each with its own words
add_module_names = False
suppress_warnings = ["ref.python"]  # names that several contracts have, such as `name`


def with_code(app, what, name, documented, options, lines):
    """Indented lines of docstrings are code, as in Markdown."""
    for number in range(len(lines) - 1, 0, -1):
        above = next((line for line in reversed(lines[:number]) if line), " ")
        if lines[number].startswith("    ") and not lines[number - 1] and not above.startswith(" "):
            lines[number:number] = ["::", ""]


def with_long_cells(app, tree, page):
    """Cells with much text are marked, so that they are not narrow on a phone (tables.css)."""
    for cell in tree.findall(nodes.entry):
        if len(cell.astext()) > 100:
            cell["classes"].append("long")


def setup(app):
    app.connect("autodoc-process-docstring", with_code)
    app.connect("doctree-resolved", with_long_cells)
