"""The article's naive server: FastAPI around `generate()`, one request at a time.

Faithful, and so are its faults. The handler computes on the event loop: while it does, nothing else moves, no second
request, no health check, no shutdown. Every request reads all weights for itself alone. Nobody is told how long the
queue is, there is no limit to it, and who has left is served all the same.
"""

from __future__ import annotations

from fastapi import FastAPI

from perf.peers.fastapi_server import Completion, Pretrained, Question, loaded, options, serve


def application(pretrained: Pretrained) -> FastAPI:
    """Return the server of this model."""
    server = FastAPI()

    @server.post("/generate")
    async def generate(question: Question) -> Completion:
        (tokens,) = pretrained.generate([pretrained.tokens(question)], question.max_tokens)
        return pretrained.completion(tokens)

    return server


def main() -> None:
    """Load the model and serve it."""
    chosen = options("The article's naive server.").parse_args()
    serve(application(loaded(chosen)), chosen)


if __name__ == "__main__":
    main()
