"""The rules of the house as tests: budgets of files and functions, the direction of imports, what is never used.

Raising a number here is a visible diff; do it with a reason in the commit.
"""

import ast
import re
import statistics
from collections import Counter
from functools import cache
from pathlib import Path

from daguerre import plugins

PACKAGE = Path(__file__).parent.parent / "src" / "daguerre"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    """The files' syntax, parsed where a test asks first: every process of the tests collects this file."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


FILE_LINES = 500
FUNCTION_LINES = 50
MEDIAN_FUNCTION_LINES = 10
LONGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS: dict[str, int] = {}

LEAVES = {
    "__version__",
    "credentials",
    "deferred",
    "devices",
    "digests",
    "documents",
    "errors",
    "faults",
    "formatting",
    "fresh",
    "keys",
    "outside",
    "plugins",
    "ranks",
    "regular",
    "settings",
    "system",
    "threads",
    "trees",
    "types",
    "unicode",
    "user_cache",
    "webhook",
    "yaml_text",
}
MAY_IMPORT: dict[str, set[str]] = {
    # room: the rooms whose modules it may import, beside itself and the leaves; nearly in the order of the house, from
    # the floor up. No two rooms import each other.
    "conditions": set(),
    "objectives": set(),
    "kernels": set(),
    "storage": set(),
    "checkpoint": set(),
    "samplers": set(),
    "training": {"kernels"},
    "distributed": {"training"},
    "data": {"checkpoint", "conditions", "storage"},
    "remote": {"checkpoint", "storage"},
    "tracking": {"checkpoint", "data"},
    "report": {"checkpoint", "tracking"},
    "models": {"checkpoint", "distributed", "objectives", "samplers"},
    "families": {"checkpoint", "models", "objectives", "samplers"},
    "adapters": {"checkpoint", "conditions", "models", "objectives", "samplers"},
    "foreign": {"data", "distributed", "models", "objectives", "samplers", "storage"},
    "config": {
        *("adapters", "checkpoint", "data", "distributed", "foreign", "models", "objectives", "remote", "samplers"),
        *("storage", "tracking", "training"),
    },
    "queue": {"checkpoint"},
    "assembly": {
        "adapters",
        "checkpoint",
        "conditions",
        "config",
        "data",
        "distributed",
        "models",
        "objectives",
        "remote",
        "training",
    },
    "caching": {"assembly", "checkpoint", "conditions", "config", "data", "models", "storage"},
    "memory": {
        *("assembly", "caching", "config", "data", "distributed", "foreign", "models", "objectives", "samplers"),
        "training",
    },
    "generation": {
        *("assembly", "checkpoint", "conditions", "config", "data", "distributed", "families", "memory"),
        *("models", "objectives", "remote", "report", "samplers", "storage", "tracking", "training"),
    },
    "evaluation": {
        *(
            "assembly",
            "checkpoint",
            "config",
            "data",
            "generation",
            "models",
            "objectives",
            "remote",
            "report",
            "samplers",
        ),
        *("tracking", "training"),
    },
    "captioning": {"checkpoint", "data", "evaluation"},
    "run": {
        *("adapters", "assembly", "caching", "checkpoint", "conditions", "config", "data", "distributed", "evaluation"),
        "generation",
        *("memory", "models", "objectives", "remote", "report", "samplers", "storage", "tracking", "training"),
    },
    "bench": {"assembly", "config", "data", "families", "models", "objectives", "run", "training"},
    "serve": {"checkpoint", "config", "data", "queue", "remote", "report", "storage", "tracking"},
    "contracts": {
        *("adapters", "assembly", "captioning", "conditions", "config", "data", "distributed", "evaluation", "models"),
        *("objectives", "samplers", "tracking", "training"),
    },
    "cli": {
        *("contracts", "serve"),
        *("bench", "assembly", "caching", "captioning", "checkpoint", "conditions", "config", "data", "distributed"),
        *("evaluation", "families", "foreign", "queue"),
        *("generation", "memory", "models", "remote", "report", "run", "samplers", "storage", "tracking", "training"),
    },
    "library": {
        *("assembly", "checkpoint", "cli", "config", "generation", "objectives", "remote", "samplers", "tracking"),
    },
    "__main__": {"cli"},
}
MODULES_OF_A_FOLDER = 20
MORE_MODULES = {"cli": 21}
"""Folders with more: a verb is a file of this folder, which has the name that users give it."""

LATE_IMPORTS = {
    # file: what it imports inside a function, with the reason beside the import
    "cli/main.py": None,
    "cli/check.py": {"daguerre.contracts"},
    "faults.py": {"platform", "tempfile", "traceback"},
    "plugins.py": None,
    "cli/train.py": {"daguerre.cli.parts", "daguerre.run"},
    "conditions/network.py": {
        *("huggingface_hub.errors", "safetensors", "safetensors.torch", "torch", "torch.nn.functional", "transformers"),
    },
    "captioning/wd14.py": {"onnxruntime"},
    "conditions/faces.py": {"onnxruntime"},
    "conditions/hed.py": {"torch", "torch.nn"},
    "data/filters/filter.py": {"daguerre.data.filters.evaluate"},
    "data/sources/huggingface.py": {"datasets"},
    "foreign/flows.py": {"daguerre.models.schedulers.flow_matching"},
    "foreign/names/values.py": {"daguerre.data.tools"},
    "storage/clients.py": {"daguerre.storage"},
    "tracking/trackers/tensorboard.py": {"torch.utils.tensorboard"},
    "tracking/trackers/wandb.py": {"wandb"},
    "training/optimizers/adamw_8bit.py": {"bitsandbytes"},
    "training/precision/quantized.py": {"bitsandbytes", "bitsandbytes.functional"},
    "training/optimizers/prodigy.py": {"prodigyopt"},
    "training/optimizers/schedule_free.py": {"schedulefree"},
}


VAGUE_ERRORS = {"ValueError", "KeyError", "TypeError", "RuntimeError", "LookupError", "IndexError", "AttributeError"}
PLAIN_ERRORS = {
    # file: the functions that raise such an error, and why it never reaches a user
    "__init__.py": {"__getattr__"},  # what Python asks of a module without the name
    "checkpoint/atomic.py": {"to_json"},  # what we save is ours
    "checkpoint/contents.py": {"collect"},
    "checkpoint/sharded.py": {"_needs_plan"},
    "checkpoint/shards.py": {
        "_check_tiles",
        "holding",
        "_gathered",
        "from_bytes",
    },  # the last one is caught by who reads
    "checkpoint/safetensors.py": {"dtype_name"},
    "checkpoint/retention.py": {"__post_init__"},  # settings have checked it
    "generation/prompts.py": {"_no_number", "_number"},  # caught where the line is known
    "data/table/arrow.py": {"_arrow"},  # caught where the file is known
    "data/plan/buckets.py": {"__post_init__"},  # sizes are computed
    "data/index/file.py": {"_decoded"},  # caught where the file is known
    "data/index/join.py": {"__getitem__"},  # a mapping's
    # caught where it is known what the file is for
    "documents.py": {"__exit__", "_whole", "check_counts", "parse", "read_object", "undigested"},
    "evaluation/blocks.py": {"read"},  # caught where it is known who can make the array again
    "evaluation/metrics/shapes.py": {"check"},  # the images are ours
    "distributed/sharding.py": {"_expect"},
    "kernels/geglu.py": {"geglu"},  # shapes are the networks' own; torch.compile traces no torch._check
    "kernels/group_norm_silu.py": {"group_norm_silu"},
    "kernels/response_norm.py": {"response_norm"},
    "models/lora_files/forms.py": {"compare"},  # what we write is ours
    "models/parts/text/token_files.py": {"_write"},  # likewise
}


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Every node of a file, walked once."""
    return list(ast.walk(tree))


@cache
def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "daguerre" else {node.module}
            )
    return found


def test_a_file_fits_its_budget():
    for path in FILES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= LONGER_FILES.get(name(path), FILE_LINES), f"{name(path)} has {lines} lines: split it by meaning"


def test_a_function_fits_a_screen():
    for path in FILES:
        for function in functions(trees()[path]):
            lines = function.end_lineno - function.lineno + 1
            budget = LONGER_FUNCTIONS.get(f"{name(path)}:{function.name}", FUNCTION_LINES)
            assert lines <= budget, f"{name(path)}: {function.name} has {lines} lines"


def test_most_functions_are_short():
    lengths = [f.end_lineno - f.body[0].lineno + 1 for tree in trees().values() for f in functions(tree)]
    assert statistics.median(lengths) <= MEDIAN_FUNCTION_LINES


def test_a_module_says_what_it_holds():
    for path in FILES:
        if path.name != "__init__.py":
            assert ast.get_docstring(trees()[path]), name(path)


def test_a_docstring_starts_with_a_verb_or_the_thing():
    words = {"what", "whether", "where", "how", "which", "who", "whose", "when", "why"}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{name(path)}: {text.splitlines()[0]}"
        for path, tree in trees().items()
        for node in nodes(tree)
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and text.split()[0].lower() in words
    ]
    assert not found, found


def test_imports_point_one_way():
    for path in FILES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        allowed = set() if room in LEAVES else MAY_IMPORT[room]
        inner = {module.split(".")[1] for module in imported(trees()[path]) if module.startswith("daguerre.")}
        too_much = inner - {room} - LEAVES - allowed
        assert not too_much, f"{name(path)} imports {sorted(too_much)}"


def test_what_only_some_systems_have_is_called_in_one_module():
    theirs = {"fcntl", "resource", "termios", "pwd", "grp", "msvcrt"}
    for path in FILES:
        found = theirs & {module.split(".")[0] for module in imported(trees()[path])}
        asked = {node.attr for node in nodes(trees()[path]) if isinstance(node, ast.Attribute)} & {"sched_getaffinity"}
        assert path.name == "system.py" or not (found | asked), f"{name(path)}: {sorted(found | asked)}"


def test_no_two_rooms_import_each_other():
    assert not {(a, b) for a, allowed in MAY_IMPORT.items() for b in allowed if a in MAY_IMPORT[b]}
    order = list(MAY_IMPORT)
    upwards = {(a, b) for a, allowed in MAY_IMPORT.items() for b in allowed if order.index(b) > order.index(a)}
    assert not upwards


def test_a_folder_has_no_more_modules_than_one_can_survey():
    for folder in {path.parent for path in FILES}:
        modules = [path.stem for path in folder.glob("[!_]*.py")]
        most = MORE_MODULES.get(folder.relative_to(PACKAGE).as_posix(), MODULES_OF_A_FOLDER)
        assert len(modules) <= most, f"{folder} has {len(modules)} modules: sort them into folders"
        # A plug-in is one file, and has the name that users give it.
        kinds = [kind for kind, own in plugins.FOLDERS.items() if folder == PACKAGE / own]
        chosen = {name for kind in kinds for name in plugins.names(kind)}
        starts = Counter(stem.partition("_")[0] for stem in modules if stem not in chosen)
        alike = [start for start, count in starts.items() if count >= 3]
        assert not alike, f"{folder}: three modules that begin with {alike} are a package"


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by their names, and ends where two are the same."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_imports_stand_at_the_top():
    for path in FILES:
        allowed = LATE_IMPORTS.get(name(path), set())
        for function in functions(trees()[path]):
            late = imported(function)
            assert allowed is None or late <= allowed, f"{name(path)}: {function.name} imports {sorted(late)}"


def test_nothing_that_runs_data_as_code():
    for path in FILES:
        for node in nodes(trees()[path]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__"}, f"{name(path)}:{node.lineno}"
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                assert caught not in {"Exception", "BaseException", "everything"}, f"{name(path)}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "shell":
                raise AssertionError(f"{name(path)}:{node.value.lineno}: no shell")
        banned = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
        assert not banned & {module.split(".")[0] for module in imported(trees()[path])}


def test_the_page_on_architecture_has_every_package_and_leaf():
    page = (PACKAGE.parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.partition("## Packages and imports")[2].partition("\n## ")[0]
    named = {each.strip("`/") for each in re.findall(r"`[a-z_]+/?`", table)}
    assert (LEAVES | MAY_IMPORT.keys()) - named == {"__version__", "__main__"}


def test_what_users_cause_is_a_user_error():
    """A bare ValueError means pydantic in its validators; elsewhere it would be told as a fault of the program."""
    for path in FILES:
        found = set()
        for function in functions(trees()[path]):
            validates = any("validator" in ast.unparse(decorator) for decorator in function.decorator_list)
            raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and node.exc]
            called = {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in raised}
            if called & VAGUE_ERRORS and not validates:
                found.add(function.name)
        assert found == PLAIN_ERRORS.get(name(path), set()), (
            f"{name(path)}: raise a UserError, or say in PLAIN_ERRORS why not"
        )


def test_no_names_that_mean_nothing():
    for path in FILES:
        assert path.stem not in {"utils", "util", "helpers", "common", "misc", "base"}
        for node in nodes(trees()[path]):
            if isinstance(node, ast.ClassDef):
                assert not node.name.endswith(("Manager", "Factory", "Handler", "Registry", "Mixin", "Helper")), (
                    node.name
                )


def test_no_cycles_between_modules():
    graph = {}
    for path in FILES:
        module = "daguerre." + name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        top = {n for n in ast.iter_child_nodes(trees()[path]) if isinstance(n, ast.Import | ast.ImportFrom)}
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


COMPONENTS = {
    *("unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "image_encoder"),
    *("vqgan", "effnet", "prior"),
}
NAMES_COMPONENTS = {
    # file: why it names components of a family
    "config/short_forms.py": "train_unet and the like, which stay as names",
    "cli/convert/export.py": "format=unet is a form of files, as the layouts of Stable Diffusion are",
    "cli/doctor.py": "looks for the files that ship",
    "models/settings.py": "the roles, three of which are also names of components",
    "models/encoders.py": "roles",
    "models/family.py": "a role",
    "models/controlnets/controlled.py": "a value of a setting of ControlNets",
    "models/weights/resolve.py": "folders of diffusers' pipelines, whose files have other names than those of networks",
}
BRING_NETWORKS = ("families/", "models/parts/", "kernels/", "evaluation/networks/")
"""Rooms that know networks: each family's, those that several use, kernels for layers of some, and the metrics'."""
SPEAKS_FOR_OTHERS = ("foreign/",)
"""Tables of other trainers' names: what they call a setting of a family."""


def test_only_families_and_their_networks_name_their_components():
    """Shared code asks for roles (models/settings.py, ComponentSpec). Docstrings may name them."""
    for path in FILES:
        shared = not name(path).startswith((*BRING_NETWORKS, *SPEAKS_FOR_OTHERS))
        found = {f"{line}: {word}" for line, word in words(trees()[path]) if word.removeprefix("train_") in COMPONENTS}
        if shared and name(path) not in NAMES_COMPONENTS:
            assert not found, f"{name(path)} names components: ask for a role ({found})"
        elif name(path) in NAMES_COMPONENTS:
            assert found, f"{name(path)} names none any more: take it out of the list"


NETWORK_CLASS = re.compile(r"(?!PreTrainedModel).*(UNet|VAE|Autoencoder|Transformer|Encoder|Model$|ModelWith|Block)")
"""Classes of libraries that are networks; PreTrainedModel is what all of transformers' are."""


def test_only_families_and_their_networks_name_their_classes():
    """A network's class brings its facts (models/network.py), and shared code asks for these."""
    classes: set[str] = set()
    for path in FILES:
        for node in nodes(trees()[path]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("diffusers", "transformers"):
                classes |= {each.name for each in node.names if NETWORK_CLASS.match(each.name)}
    for path in FILES:
        if not name(path).startswith((*BRING_NETWORKS, *SPEAKS_FOR_OTHERS)):
            found = {f"{line}: {word}" for line, word in words(trees()[path]) if word in classes}
            assert not found, f"{name(path)} names classes of networks: {found}"


LAYER = re.compile(
    r"_?((single_)?transformer_blocks|(double|single|input|output|up|down)_blocks|mid(dle)?_block|diffusion_model"
    r"|to_(q|k|v|qkv|out|add_out)|add_[qkv]_proj|([qkvo]|in|out|gate|up|down)_proj|proj_(in|out|mlp)|self_attn|cross_attn|attn\d?"
    r"|attentions|resnets|fc[12]|text_model|text_projection|token_embedding|embed_tokens|lm_head|conv_(in|out|shortcut)|conv[12]"
    r"|time_embedding|add_embedding|[a-z]+_embedder|norm_out|norm[1-4]|layer_norm[12]|(post_)?quant_conv)"
)
"""Names that layers have in the networks of diffusers, of transformers and of their authors."""
NAMES_LAYERS = {
    # file: why it names layers
    "cli/convert/export.py": "what files of ComfyUI and A1111 put before all names",
    "distributed/sharding_rules.py": "logical axes, two of which MaxDiffusion calls as layers of UNets are called",
    "models/lora_files/names.py": "attention in LoRAs of older versions of diffusers, whichever network they are for",
    "models/lora_files/strangers.py": "marks of files that are no LoRAs",
    "models/weights/original_names.py": "what files of ComfyUI and A1111 put before all names",
}


def test_only_families_and_their_networks_name_their_layers():
    """What shared code does with some layers of a network is a fact of its class (models/network.py)."""
    naming = {
        name(path)
        for path in FILES
        if not name(path).startswith((*BRING_NETWORKS, *SPEAKS_FOR_OTHERS))
        and any(LAYER.fullmatch(word) for _, word in words(trees()[path]))
    }
    assert naming == NAMES_LAYERS.keys(), "shared code names layers, or a file of the list does no more"


MEANS_MORE = {"autoencoder", "clip"}
"""Names of families that are also that of a role or objective, and of a kind of network."""
NAMES_FAMILIES = {
    # file: why it names a family
    "cli/doctor.py": "looks for the files that ship",
    "cli/recipes.py": "the one that an example has, of those that could stand there",
}


def test_a_family_is_one_file_that_no_other_code_asks_for_by_its_name():
    """What shared code does for some families is a fact that they bring."""
    files = {path.stem: path for path in FILES if re.fullmatch(r"families/[a-z]\w+\.py", name(path))}
    assert len(files) > 10
    long = {stem: count for stem, path in files.items() if (count := len(path.read_text().splitlines())) > 300}
    assert not long, f"what several families can use is a part (models/parts/): {long}"
    names = files.keys() - MEANS_MORE
    naming = {
        name(path)
        for path in FILES
        if not name(path).startswith((*BRING_NETWORKS, *SPEAKS_FOR_OTHERS))
        and any(isinstance(node, ast.Constant) and node.value in names for node in nodes(trees()[path]))
    }
    assert naming == NAMES_FAMILIES.keys(), "shared code names families, or a file of the list does no more"


def words(tree: ast.Module) -> list[tuple[int, str]]:
    """Names and the words of texts, with their lines, without docstrings."""
    prose = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found += [(node.lineno, word) for word in re.findall(r"\w+", node.value)]
        named = [getattr(node, key, None) for key in ("id", "attr", "arg", "name")]
        found += [(getattr(node, "lineno", 0), word) for word in named if isinstance(word, str)]
    return found


DIALECT = re.compile(r"\b(told|anew|alike|likewise|is none|beside)\b", re.IGNORECASE)
"""Words that stood in docstrings and messages 508 times where a reader with English as a second language stops."""


def test_docstrings_and_messages_are_in_plain_english():
    found = []
    for path in FILES:
        texts = [
            node for node in nodes(trees()[path]) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        for node in texts:  # one word alone is a key or a name
            uses = DIALECT.findall(node.value) if " " in node.value else ()
            found += [f"{name(path)}:{node.lineno}: {word}" for word in uses]
    assert len(found) <= 28, "\n".join(found)
