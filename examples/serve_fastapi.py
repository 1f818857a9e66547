"""Serves an exported model over HTTP with FastAPI: requests that come at the same time are computed as one batch.

    pip install fastapi uvicorn scikit-learn
    python examples/serve_fastapi.py --model digits.export        # makes the file first, if it is not there
    curl localhost:8000/health
    curl localhost:8000/predict -H 'Content-Type: application/json' -d '{"rows": [[0, 0, ...]]}'

With `--preprocessing`, requests have what a saved preprocessing layer takes: texts or, for a FeatureSpace, columns.

    python examples/serve_fastapi.py --model reviews.export --preprocessing reviews_text.json
    curl localhost:8000/predict -H 'Content-Type: application/json' -d '{"rows": ["A fine film!", "very dull"]}'

The server needs no code of the model. One thread computes; the event loop answers meanwhile. Batches are padded to a
few sizes, each of which is compiled when the server starts, so that no request waits for a compilation.
"""

import argparse
import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import numpy as np
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import trainer
from trainer.data import preprocessing


class Rows(BaseModel):
    """The rows of inputs of a request: nested lists of numbers, or what the preprocessing layer takes."""

    rows: list | dict[str, list]


class Batcher:
    """Collects rows of requests for a moment, and computes them together.

    Args:
      model: the exported model.
      max_rows: the most rows of a batch.
      wait_secs: how long the first request of a batch waits for others.
    """

    def __init__(self, model: trainer.ExportedModel, max_rows: int = 64, wait_secs: float = 0.005):
        self.model, self.max_rows, self.wait_secs = model, max_rows, wait_secs
        self.batches = self.requests = 0
        self._queue: asyncio.Queue = asyncio.Queue()
        self._sizes = [2**power for power in range(max_rows.bit_length()) if 2**power <= max_rows]

    async def predict(self, rows: np.ndarray) -> np.ndarray:
        """Returns the outputs for some rows, when the batch that they are in has been computed."""
        answer = asyncio.get_running_loop().create_future()
        await self._queue.put((rows, answer))
        return await answer

    def warm_up(self) -> None:
        """Compiles each size of a batch."""
        for size in self._sizes:
            self._compute(np.zeros((size, *self.model.input_spec.shape[1:]), self.model.input_spec.dtype))

    async def run(self) -> None:
        """Computes batches until it is cancelled."""
        left = None
        while True:
            batch = [left or await self._queue.get()]
            left, rows = None, len(batch[0][0])
            deadline = asyncio.get_running_loop().time() + self.wait_secs
            while rows < self.max_rows:
                try:
                    timeout = max(0.0, deadline - asyncio.get_running_loop().time())
                    request = await asyncio.wait_for(self._queue.get(), timeout)
                except TimeoutError:
                    break
                if rows + len(request[0]) > self.max_rows:
                    left = request
                    break
                batch.append(request)
                rows += len(request[0])
            await self._answer(batch)

    async def _answer(self, batch: list) -> None:
        self.batches, self.requests = self.batches + 1, self.requests + len(batch)
        try:
            outputs = await asyncio.to_thread(self._compute, np.concatenate([rows for rows, _ in batch]))
        except Exception as error:
            for _, answer in batch:
                if not answer.cancelled():
                    answer.set_exception(error)
            return
        start = 0
        for rows, answer in batch:
            if not answer.cancelled():  # the client may have gone
                answer.set_result(outputs[start:start + len(rows)])
            start += len(rows)

    def _compute(self, rows: np.ndarray) -> np.ndarray:
        size = next((size for size in self._sizes if size >= len(rows)), len(rows))
        padded = np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])
        return np.asarray(self.model(padded))[:len(rows)]


def make_app(path: str, max_rows: int = 64, wait_secs: float = 0.005, layer_path: str | None = None) -> FastAPI:
    """Returns a server of the exported model in a file, which gives requests to the layer in another file first."""
    model = trainer.load_exported(path)
    layer = preprocessing.load(layer_path) if layer_path else np.asarray
    expected = f"what {type(layer).__name__} takes" if layer_path else "numbers in lists of equal lengths"
    shape, dtype = model.input_spec.shape[1:], model.input_spec.dtype
    batcher = Batcher(model, max_rows, wait_secs)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(batcher.warm_up)
        running = asyncio.create_task(batcher.run())
        yield
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    app = FastAPI(title=os.path.basename(path), lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict:
        return {"status": "ok", "inputs": ["rows", *shape], "dtype": str(dtype), "requests": batcher.requests,
                "batches": batcher.batches}

    @app.post("/predict")
    async def predict(request: Rows) -> dict:
        try:
            rows = np.asarray(layer(request.rows), dtype)
        except (ValueError, TypeError) as error:
            raise HTTPException(422, f"`rows` must be {expected}: {error}") from error
        if rows.shape[1:] != shape or not 0 < len(rows) <= max_rows:
            raise HTTPException(422, f"`rows` must have the shape {('rows', *shape)}, with 1 to {max_rows} rows. "
                                     f"Received: {rows.shape}.")
        return {"outputs": (await batcher.predict(rows)).tolist()}

    return app


def export_digits(path: str) -> None:
    """Trains a small network on scikit-learn's digits, and exports it."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    model = trainer.Model(trainer.models.MLP(num_classes=10))
    model.compile("adam", "sparse_categorical_crossentropy",
                  metrics=["accuracy"])
    model.fit((images / 16).astype(np.float32), labels, batch_size=64, epochs=10, verbose=2)
    model.export(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="digits.export")
    parser.add_argument("--preprocessing", help="the JSON file of a preprocessing layer")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if not os.path.exists(options.model):
        export_digits(options.model)
    import uvicorn

    uvicorn.run(make_app(options.model, layer_path=options.preprocessing), port=options.port)


if __name__ == "__main__":
    main()
