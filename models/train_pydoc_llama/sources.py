"""The documents: everything readable that ships with the running CPython.

Yields raw documents, before deduplication, split and tokenization.
"""

import ast
import importlib
import importlib.util
import inspect
import io
import re
import sys
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

# Test suites are code about code, and the two others hold third-party packages.
LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "site-packages", "_bundled", "__pycache__"}
LEFT_OUT_MODULES = re.compile(r"_test|_xx|xx|_ctypes_test|antigravity|this|idlelib")
MIN_COMMENT_LINES = 3


@dataclass(frozen=True)
class Document:
    """One text. `kind`: topic, module, class, function, comment or page; `name` is dotted."""

    kind: str
    name: str
    signature: str
    text: str


def all_documents() -> Iterator[Document]:
    """Yield every document, in an order that depends only on the Python installation."""
    yield from _topics()
    yield from _idle_help()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if LEFT_OUT_FOLDERS.isdisjoint(parts):
            yield from _source_file(path, ".".join(part for part in parts if part != "__init__"))
    yield from _compiled_modules()


def _topics() -> Iterator[Document]:
    for name in sorted(topics):
        yield Document("topic", name, "", topics[name])


class _TextOfHtml(HTMLParser):
    """Collects the paragraphs of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"p", "dt", "dd", "li", "h1", "h2", "h3", "h4", "pre", "div", "tr"}:
            self.paragraphs.append("")

    def handle_data(self, data: str) -> None:
        self.paragraphs[-1] += data.replace("\n", " ").replace("¶", "")


def _idle_help() -> Iterator[Document]:
    page = Path(sysconfig.get_paths()["stdlib"]) / "idlelib" / "help.html"
    if not page.exists():
        return
    parser = _TextOfHtml()
    parser.feed(page.read_text(encoding="utf-8"))
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in parser.paragraphs if len(paragraph.split()) > 5)
    yield Document("page", "IDLE", "", text)


def _source_file(path: Path, module: str) -> Iterator[Document]:
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return  # lib2to3 ships files that are not Python 3 on purpose
    yield from _docstrings(tree, module)
    yield from _comments(source, module)


def _docstrings(node: ast.AST, name: str) -> Iterator[Document]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and isinstance(node, ast.Module):
            yield Document("module", name, "", text)
        elif text and isinstance(node, ast.ClassDef):
            yield Document("class", name, "", text)
        elif text and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Document("function", name, f"({ast.unparse(node.args)})", text)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}")
        else:
            yield from _docstrings(child, name)


def _comments(source: str, module: str) -> Iterator[Document]:
    block: list[str] = []
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        if token.start[0] != last_line + 1:
            yield from _comment_block(block, module)
            block = []
        block.append(re.sub(r"^#+:? ?", "", token.string))
        last_line = token.start[0]
    yield from _comment_block(block, module)


def _comment_block(lines: list[str], module: str) -> Iterator[Document]:
    """Yield a comment if it is prose: commented-out code, tables and rulers are left out."""
    text = inspect.cleandoc("\n".join(lines))
    words = re.findall(r"[A-Za-z']+", text)
    lower = sum(word.islower() for word in words)
    symbols = len(re.findall(r"[=_(){}\[\]<>|#*+\\/]", text))
    if len(lines) >= MIN_COMMENT_LINES and lower >= 20 and lower > 0.7 * len(words) and symbols < 0.03 * len(text):
        yield Document("comment", module, "", text)


def _compiled_modules() -> Iterator[Document]:
    for name in sorted(sys.stdlib_module_names | set(sys.builtin_module_names)):
        if LEFT_OUT_MODULES.match(name):
            continue
        spec = importlib.util.find_spec(name) if name != "__main__" else None
        if spec is None or (spec.origin or "").endswith(".py"):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # an optional library of the operating system is missing
        yield from _members(module, name)


def _members(module: ModuleType, name: str) -> Iterator[Document]:
    if module.__doc__:
        yield Document("module", name, "", inspect.cleandoc(module.__doc__))
    for member_name, member in sorted(vars(module).items()):
        if isinstance(member, ModuleType):
            continue
        yield from _described(member, f"{name}.{member_name}")
        if isinstance(member, type):
            for attribute, value in sorted(vars(member).items()):
                if attribute != "__doc__":
                    yield from _described(value, f"{name}.{member_name}.{attribute}")


def _described(member: object, name: str) -> Iterator[Document]:
    kind = "class" if isinstance(member, type) else "function"
    if kind == "function" and not (callable(member) or inspect.isdatadescriptor(member)):
        return  # an ordinary value shows the docstring of its type
    text = getattr(member, "__doc__", None)
    if isinstance(text, str) and text.strip():
        signature = getattr(member, "__text_signature__", None) or ""
        signature = re.sub(r"\$?(self|module|type), /,? ?|\$(self|module|type),? ?", "", signature)
        yield Document(kind, name.removeprefix("builtins."), signature, inspect.cleandoc(text))
