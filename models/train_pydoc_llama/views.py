"""How a document is shown to the model: with its name, without it, from a later paragraph, or as an answer in a chat.

A document is drawn in another view at every epoch: the text stays, what stands before it changes.
"""

import random
from dataclasses import replace

from models.train_pydoc_llama.sources import Document
from models.train_pydoc_llama.tokenizer import BOS, EOS

CHAT_SHARE = 0.14
NAMED_SHARE = 0.38
SYSTEM_SHARE = 0.25
ANSWER_CHARACTERS = 700

SYSTEM_TEXTS = (
    "You are a helpful assistant that answers questions about Python.",
    "You answer questions about the Python standard library.",
    "Answer in plain English.",
)
QUESTIONS = {
    "function": ("What does {} do?", "What does {} return?", "Explain {}.", "How does {} work?"),
    "class": ("What is {}?", "What is the class {} for?", "Explain {}."),
    "module": ("What is the {} module?", "What does the {} module provide?", "What is {} for?"),
    "topic": ("Explain {} in Python.", "What is {} in Python?", "Tell me about {}."),
    "page": ("How do I use {}?", "Tell me about {}."),
}


def plain_view(document: Document) -> str:
    """Return the held-out form: the text alone, between the two special tokens."""
    return f"{BOS}{document.text}{EOS}"


def random_view(document: Document, draw: random.Random) -> str:
    """Return one of the forms, special tokens included."""
    form = draw.random()
    questions = QUESTIONS.get(document.kind)
    if questions and form < CHAT_SHARE:
        return _chat(document, draw.choice(questions), draw)
    if document.kind == "function" and form < CHAT_SHARE + NAMED_SHARE:
        return f"{BOS}{document.name}{document.signature}\n\n{document.text}{EOS}"
    if document.kind in {"class", "module"} and form < CHAT_SHARE + NAMED_SHARE:
        return f"{BOS}{document.kind} {document.name}\n\n{document.text}{EOS}"
    return f"{BOS}{_from_some_paragraph(document, draw)}{EOS}"


def pieces(document: Document, draw: random.Random, size: int = 1800) -> list[Document]:
    """Cut a long document at paragraphs, at other places each time, so that many of its sentences come first."""
    paragraphs = document.text.split("\n\n")
    cut: list[Document] = []
    current: list[str] = []
    limit = draw.randint(size // 3, size)
    for paragraph in paragraphs:
        if current and sum(map(len, current)) + len(paragraph) > limit:
            cut.append(replace(document, text="\n\n".join(current)))
            current = []
            limit = draw.randint(size // 3, size)
        current.append(paragraph)
    cut.append(replace(document, text="\n\n".join(current)))
    return cut


def _from_some_paragraph(document: Document, draw: random.Random) -> str:
    """Return the text, at random without a heading or signature before its first sentence."""
    head, _, rest = document.text.partition("\n\n")
    if rest and len(head) < 60 and not head.rstrip().endswith(".") and draw.random() < 0.5:
        return rest
    return document.text


def _chat(document: Document, question: str, draw: random.Random) -> str:
    name = document.name
    if document.kind == "topic":
        name = f"the topic {name}" if draw.random() < 0.3 else name
    elif document.kind in {"function", "class"} and name.count(".") > 1 and draw.random() < 0.5:
        name = ".".join(name.split(".")[-2:])
    prompt = question.format(name)
    if draw.random() < SYSTEM_SHARE:
        prompt = f"<<SYS>>\n{draw.choice(SYSTEM_TEXTS)}\n<</SYS>>\n\n{prompt}"
    answer = ""
    for paragraph in document.text.split("\n\n"):
        if answer and len(answer) + len(paragraph) > ANSWER_CHARACTERS:
            break
        answer += ("\n\n" if answer else "") + paragraph
    return f"{BOS}[INST] {prompt} [/INST] {answer.strip()} {EOS}"
