"""The documentation site: `sphinx-build -W --keep-going -n docs build/docs`; see CONTRIBUTING.md."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("MPLBACKEND", "agg")

from generator import assets, build, docstrings, forge, search  # noqa: E402
from generator import project as about  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import anymax  # noqa: E402

project = "anymax"
author = "The anymax authors"
project_copyright = "the anymax authors, Apache-2.0"
version = release = anymax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
# prose, code and parts from which pages are made
exclude_patterns = [
    *("maps/*", "scores/*", "answers/*", "gallery/*"),
    *("generated/static/*", "generated/extra/*", "generated/parts/*"),
]
nitpicky = True
# the types of other packages, and private ones
nitpick_ignore_regex = [
    (r"py:.*", r"(?!anymax\.).*"),
    (r"py:.*", r"anymax\.(.*\.)?_.*"),
    (
        r"py:class",
        r"anymax\.(sklearn\.(parameters|tuning)|nn\.base|vllm\.processor)\..*",
    ),
    (r"py:obj", r"anymax\.nn\.linear_loss\.Result"),  # a variable of types
]

source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_enable_extensions = [
    "amsmath",
    "attrs_block",
    "attrs_inline",
    "colon_fence",
    "deflist",
    "dollarmath",
    "substitution",
]
myst_heading_anchors = 3
myst_links_external_new_tab = False

default_role = "literal"
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_param = False
autodoc_member_order = "bysource"
autosummary_generate = False  # the entries stand on the same page as their table
python_use_unqualified_type_names = True

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": "FileNameSortKey",
    "capture_repr": (),
    "download_all_examples": True,  # on the gallery's first page: all scripts, all notebooks
    "first_notebook_cell": "%pip install -q 'anymax[plot,sklearn]'\n%matplotlib inline",
    "show_memory": False,
    "write_computation_times": False,  # that page loads scripts of other servers
    "min_reported_time": 1e6,
    "abort_on_example_error": True,
}

templates_path = ["_templates"]
html_theme = "pydata_sphinx_theme"
html_title = "anymax"
html_static_path = ["_static", "generated/static"]
html_extra_path = ["generated/extra"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_favicon = "_static/mark.svg"
html_theme_options = {
    "logo": {
        "text": "anymax",
        "image_light": "_static/mark.svg",
        "image_dark": "_static/mark.svg",
        "alt_text": "",
    },
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 7,
    "icon_links": about.icons(),
    "footer_start": ["copyright"],
    "footer_end": [],
    "navbar_persistent": ["search-button"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
WIDE = "index start choose zh explorer performance mathematics contributing changelog".split()  # pages without a sidebar
html_sidebars = {page: [] for page in WIDE}

# One file with all of its extensions, SVG output: no fonts, no network. The menu is off because parts of it load further files.
mathjax_path = "mathjax/tex-svg-full.js"
mathjax3_config = {
    "options": {
        "enableMenu": False,
        "menuOptions": {"settings": {"assistiveMml": True}},
    },
    "svg": {"fontCache": "global"},
}

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_workers = 8
linkcheck_anchors = False

suppress_warnings = ["config.cache"]


def setup(app):
    verb = ModuleAnalyzer.for_module("anymax._attention.verb")
    verb.analyze()
    verb.overloads.clear()  # the page shows one signature with every option
    generated = HERE / "generated"
    assets.write(generated)
    search.write(generated / "static")
    build.write(generated)
    app.connect("source-read", forge.read)
    # before napoleon's, at 500
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)
    app.connect("autodoc-process-signature", docstrings.signature)
    # the search index forgets the entries of pages that are not written again
    app.connect("env-updated", lambda app, env: sorted(env.found_docs))
