"""The rules of the house as tests: budgets of files and functions, the direction of imports, what is never used.

Raising a number here is a visible diff; do it with a reason in the commit.
"""

import ast
import re
import statistics
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "daguerre"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

FILE_LINES = 500
FUNCTION_LINES = 50
MEDIAN_FUNCTION_LINES = 10
LONGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS: dict[str, int] = {}

LEAVES = {
    "__version__",
    "credentials",
    "errors",
    "faults",
    "keys",
    "plugins",
    "settings",
    "types",
    "unicode",
    "user_cache",
}
MAY_IMPORT = {
    # part: the parts of the package that its modules may import, beside itself and the leaves
    "credentials": set(),
    "errors": set(),
    "faults": {"__version__"},
    "keys": set(),
    "types": set(),
    "unicode": set(),
    "settings": set(),
    "plugins": set(),
    "user_cache": set(),
    "objectives": set(),
    "samplers": {"objectives"},
    "families": {"objectives", "samplers", "checkpoint"},
    "adapters": {"families", "objectives", "samplers", "checkpoint"},
    "data": set(),
    "training": {"kernels"},
    "kernels": set(),
    "parallel": {"training"},
    "checkpoint": set(),
    "evaluation": {"data"},
    "report": {"training", "checkpoint"},
    "remote": {"checkpoint", "data"},  # run folders in object stores: the protocol, and the clients of stores
}
ABOVE = {"commands", "cli", "__main__", "config", "checks", "layers", "layout", "recipe", "overrides", "aliases"}
ABOVE |= {"problems", "schema", "foreign", "alias_names", "alias_relative", "alias_values"}
ABOVE |= {"adapter_forms", "alias_flags", "alias_later", "alias_peers", "alias_peers_values", "foreign_peers"}
"""May import everything below them; nothing below imports them."""

LATE_IMPORTS = {
    # file: what it imports inside a function, with the reason beside the import
    "cli/main.py": None,
    "plugins.py": None,
    "cli/train.py": {"daguerre.commands"},
    "data/sources/huggingface.py": {"datasets"},
    "tracking/sinks.py": {"torch.utils.tensorboard"},
    "training/optimizers/adamw_8bit.py": {"bitsandbytes"},
    "training/optimizers/prodigy.py": {"prodigyopt"},
    "training/optimizers/schedule_free.py": {"schedulefree"},
}


VAGUE_ERRORS = {"ValueError", "KeyError", "TypeError", "RuntimeError", "LookupError", "IndexError", "AttributeError"}
PLAIN_ERRORS = {
    # file: the functions that raise such an error, and why it never reaches a user
    "checkpoint/atomic.py": {"to_json"},  # what we save is ours
    "checkpoint/contents.py": {"collect"},
    "checkpoint/sharded.py": {"_agreed", "_needs_plan"},
    "checkpoint/shards.py": {"_check_tiles", "holding", "plan", "from_bytes"},  # the last one is caught by who reads
    "checkpoint/safetensors.py": {"dtype_name"},
    "checkpoint/failed_saves.py": {"__post_init__"},  # settings have checked it
    "checkpoint/retention.py": {"__post_init__"},
    "generation/prompts.py": {"_no_number", "_number"},  # caught where the line is known
    "data/table/arrow.py": {"_arrow"},  # caught where the file is known
    "data/plan/buckets.py": {"__post_init__"},  # sizes are computed
    "data/index/file.py": {"_decoded"},  # caught where the file is known
    "data/index/join.py": {"__getitem__"},  # a mapping's
    "evaluation/shapes.py": {"check"},  # the pictures are ours
    "distributed/sharding.py": {"_expect"},
}


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "daguerre" else {node.module}
            )
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_file_fits_its_budget(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGER_FILES.get(name(path), FILE_LINES), f"{name(path)} has {lines} lines: split it by meaning"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_function_fits_a_screen(path):
    for function in functions(TREES[path]):
        lines = function.end_lineno - function.lineno + 1
        budget = LONGER_FUNCTIONS.get(f"{name(path)}:{function.name}", FUNCTION_LINES)
        assert lines <= budget, f"{name(path)}: {function.name} has {lines} lines"


def test_most_functions_are_short():
    lengths = [f.end_lineno - f.body[0].lineno + 1 for tree in TREES.values() for f in functions(tree)]
    assert statistics.median(lengths) <= MEDIAN_FUNCTION_LINES


@pytest.mark.parametrize("path", FILES, ids=name)
def test_a_module_says_what_it_holds(path):
    if path.name != "__init__.py":
        assert ast.get_docstring(TREES[path]), name(path)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_one_way(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part in ABOVE or part == "__init__":
        return
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT what it may import"
    inner = {module.split(".")[1] for module in imported(TREES[path]) if module.startswith("daguerre.")}
    too_much = inner - {part} - LEAVES - MAY_IMPORT[part]
    assert not too_much, f"{name(path)} imports {sorted(too_much)}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_below_imports_a_command(path):
    if path.relative_to(PACKAGE).parts[0] not in {"commands", "cli/main.py", "__main__.py"}:
        above = [m for m in imported(TREES[path]) if m.startswith(("daguerre.commands", "daguerre.cli.main"))]
        assert not above


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_stand_at_the_top(path):
    allowed = LATE_IMPORTS.get(name(path), set())
    for function in functions(TREES[path]):
        late = imported(function)
        assert allowed is None or late <= allowed, f"{name(path)}: {function.name} imports {sorted(late)}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_that_runs_data_as_code(path):
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}, f"{name(path)}:{node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in {"Exception", "BaseException", "everything"}, f"{name(path)}:{node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "shell":
            raise AssertionError(f"{name(path)}:{node.value.lineno}: no shell")
    banned = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
    assert not banned & {module.split(".")[0] for module in imported(TREES[path])}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_what_users_cause_is_a_user_error(path):
    """A bare ValueError means pydantic in its validators; elsewhere it would be told as a fault of the program."""
    found = set()
    for function in functions(TREES[path]):
        validates = any("validator" in ast.unparse(decorator) for decorator in function.decorator_list)
        raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and node.exc]
        called = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in raised}
        if called & VAGUE_ERRORS and not validates:
            found.add(function.name)
    assert found == PLAIN_ERRORS.get(name(path), set()), (
        f"{name(path)}: raise a UserError, or say in PLAIN_ERRORS why not"
    )


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_names_that_mean_nothing(path):
    assert path.stem not in {"utils", "util", "helpers", "common", "misc", "base"}
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ClassDef):
            assert not node.name.endswith(("Manager", "Factory", "Handler", "Registry", "Mixin", "Helper")), node.name


def test_no_cycles_between_modules():
    graph = {}
    for path in FILES:
        module = "daguerre." + name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        top = {n for n in ast.iter_child_nodes(TREES[path]) if isinstance(n, ast.Import | ast.ImportFrom)}
        graph[module] = {m for node in top for m in imported(ast.Module([node], [])) if m.startswith("daguerre")}
    seen: dict[str, bool] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module in graph and module not in seen:
            for other in graph[module]:
                visit(other, (*trail, module))
            seen[module] = True

    for module in graph:
        visit(module, ())


COMPONENTS = {"unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "image_encoder"}
NAMES_COMPONENTS = {
    # file: why it names components of a family
    "config/adapter_forms.py": "train_unet and the like, which stay as names",
    "cli/convert/export.py": "format=unet is a form of files, as the layouts of Stable Diffusion are",
    "cli/doctor.py": "looks for the files that ship",
}
SPEAKS_FOR_OTHERS = ("alias", "commands/convert_config")
"""Tables of other trainers' names: what they call a setting of a family."""


def test_only_families_name_their_components():
    """Shared code asks for roles (models/settings.py, ComponentSpec). Docstrings and help texts may name them."""
    for path in FILES:
        shared = not name(path).startswith(("families/", *SPEAKS_FOR_OTHERS))
        found = {f"{line}: {word}" for line, word in words(TREES[path]) if word.removeprefix("train_") in COMPONENTS}
        if shared and name(path) not in NAMES_COMPONENTS:
            assert not found, f"{name(path)} names components: ask for a role"
        elif name(path) in NAMES_COMPONENTS:
            assert found, f"{name(path)} names none any more: take it out of the list"


def words(tree: ast.Module) -> list[tuple[int, str]]:
    """Names and the words of texts, with their lines, without docstrings and help texts."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    prose |= {id(node.value) for node in assigned if ast.unparse(node.targets[0]) == "HELP"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found += [(node.lineno, word) for word in re.findall(r"\w+", node.value)]
        named = [getattr(node, key, None) for key in ("id", "attr", "arg", "name")]
        found += [(getattr(node, "lineno", 0), word) for word in named if isinstance(word, str)]
    return found
