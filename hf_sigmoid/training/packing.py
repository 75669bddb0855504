"""Packed blocks: no token lost, no label across documents, resumable to the token.

The documents of a stream are laid end to end in a seeded order (reading_order.py); every
`block_size` tokens make a block. Inside a block each document's positions start at 0, which is how
transformers recognises packed documents and keeps them from seeing each other. A document that
does not fit goes on in the next block, where it starts at 0 again: its tokens stay, and so does
every label, because labels are shifted here and the last token of a block is still asked for the
document's next one.

Several streams pack disjoint documents side by side. A step takes the same number of blocks from
each of them, so which blocks it has does not depend on how they are divided over processes and
micro-batches, and no process reads another one's documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import torch

from hf_sigmoid.training.reading_order import DocumentReader, Epochs, ShardReader, parts_of

IGNORED = -100  # what cross_entropy leaves out


@dataclass
class Block:
    """One row: `labels[i]` is the token after `input_ids[i]` in its document, or IGNORED.

    `weights[i]` is how much the prediction of `labels[i]` counts in a distillation.
    """

    input_ids: list[int]
    position_ids: list[int]
    labels: list[int]
    weights: list[float]


class Packer:
    """The blocks of some of the streams that a corpus is read in.

    Args:
        corpus: with text for at least one block in every source (`corpus.check_length`).
        encode: text to token ids, special tokens included.
        block_size: tokens of a block.
        seed: of the order; every epoch has its own.
        streams: that the corpus is read in, by all processes together.
        mine: the streams that this process reads.
        share: of the blocks, that `others` makes.
        others: from a reader of a source, and a seed, to what makes other blocks of it.
    """

    def __init__(
        self, corpus: Any, encode: Callable[[str], list[int]], block_size: int, seed: int, *,
        streams: int = 1, mine: Sequence[int] = (0,), share: float = 0.0,
        others: Callable[[Any, str], Any] | None = None,
    ):  # fmt: skip
        self.mine = mine
        # One source is read in the order that the seed alone gives.
        seeds = [f"{seed}/{i}" for i in range(len(corpus.sources))]
        parts = [
            _readers(source, seed if len(seeds) == 1 else own, streams)
            for source, own in zip(corpus.sources, seeds, strict=True)
        ]
        self._streams: dict[int, _Packed | _Mixed] = {}
        for stream in mine:
            packed: list[Any] = [_Packed(part(stream), encode, block_size) for part in parts]
            for i, source in enumerate(corpus.sources) if share else ():
                own = f"{seed}/{i}/others"
                other = others(_readers(source, own, streams)(stream), f"{own}/{stream}")
                packed[i] = _Mixed([packed[i], other], (1 - share, share), stream)
            self._streams[stream] = (
                packed[0] if len(packed) == 1 else _Mixed(packed, corpus.weights, stream)
            )

    def next_block(self, stream: int) -> Block:
        return self._streams[stream].next_block()

    def state(self) -> dict[str, dict[str, Any]]:
        """The place of every stream of this process, by the stream's number."""
        return {str(number): stream.state() for number, stream in self._streams.items()}

    def load_state(self, state: dict[str, dict[str, Any]]) -> None:
        """Go on from a state, which may have other streams as well."""
        for number, stream in self._streams.items():
            stream.load_state(state[str(number)])


class _Packed:
    """The blocks of one source: its reader's place, and the tokens of that document given out."""

    def __init__(self, reader: Any, encode: Callable[[str], list[int]], block_size: int):
        self.reader, self.encode, self.block_size = reader, encode, block_size
        self.offset = 0
        self._tokens: list[int] | None = None  # of the document at the reader's place, once read

    def state(self) -> dict[str, int]:
        return {**self.reader.state(), "offset": self.offset}

    def load_state(self, state: dict[str, int]) -> None:
        self.reader.load_state(state)
        self.offset, self._tokens = state["offset"], None

    def next_block(self) -> Block:
        block = Block([], [], [], [1.0] * self.block_size)
        while (room := self.block_size - len(block.input_ids)) > 0:
            if self._tokens is None:
                document = self.reader.read()
                self._tokens = self.encode(document) if document.strip() else []
            rest = self._tokens[self.offset : self.offset + room + 1]
            piece, following = rest[:room], rest[1:]
            block.input_ids += piece
            block.position_ids += range(len(piece))
            block.labels += following + [IGNORED] * (len(piece) - len(following))
            self.offset += len(piece)
            if self.offset >= len(self._tokens):
                self.reader.advance()
                self.offset, self._tokens = 0, None
        return block


class _Mixed:
    """The blocks of several sources by turns, so that each has its weight's part of the tokens.

    A schedule of deadlines: block j = 0, 1, … of a source of weight w is due by turn ⌈(j + 1) / w⌉
    and may not come before turn ⌊j / w⌋ + 1. To take the eligible block that is due first keeps
    every source within one block of w × turns, at any turn (Baruah et al. 1996, "Proportionate
    progress"; one machine, so plain deadlines do). To take the source that lags most does not: it
    was seen 1.3 blocks behind. Stream s begins at turn s: streams that all began with the same
    source would fill whole steps with it.
    """

    def __init__(self, sources: list[Any], weights: Sequence[float], phase: int):
        self.sources = sources
        exact = [Fraction(str(weight)) for weight in weights]
        self.weights = [weight / sum(exact) for weight in exact]
        self.given = [0] * len(sources)
        for _ in range(phase):
            self.given[self._due()] += 1

    def state(self) -> dict[str, Any]:
        """The turns that each source has had, the stream's first turn counted in, and its place."""
        return {"given": list(self.given), "sources": [source.state() for source in self.sources]}

    def load_state(self, state: dict[str, Any]) -> None:
        self.given = list(state["given"])
        for source, place in zip(self.sources, state["sources"], strict=True):
            source.load_state(place)

    def next_block(self) -> Block:
        source = self._due()
        self.given[source] += 1
        return self.sources[source].next_block()

    def _due(self) -> int:
        turns = sum(self.given) + 1
        return min(
            (ceil((given + 1) / weight), i)
            for i, (given, weight) in enumerate(zip(self.given, self.weights, strict=True))
            if weight * turns > given
        )[1]


def _readers(source: Any, seed: int | str, streams: int) -> Callable[[int], Any]:
    """From a stream's number to its reader of a source."""
    if hasattr(source, "windows"):
        epochs = Epochs(source.shards * parts_of(source.shards, streams), seed)
        return lambda stream: ShardReader(source, epochs, stream, streams)
    epochs = Epochs(len(source), seed)
    return lambda stream: DocumentReader(source, epochs, stream, streams)


def streams_of(rank: int, ranks: int, streams: int) -> range:
    """The streams that a process reads."""
    assert streams % ranks == 0, (streams, ranks)
    return range(rank * streams // ranks, (rank + 1) * streams // ranks)


def step_batches(
    packer: Packer, batch_size: int, grad_accumulation: int
) -> list[dict[str, torch.Tensor]]:
    """One process's micro-batches of one step, from the streams that are its own.

    The blocks of a step are those of stream 0, then those of stream 1, …; a process has a run of
    them, and so has a micro-batch.
    """
    each, rest = divmod(batch_size * grad_accumulation, len(packer.mine))
    assert not rest, (batch_size, grad_accumulation, packer.mine)
    blocks = [packer.next_block(stream) for stream in packer.mine for _ in range(each)]
    return [_batch(blocks[i : i + batch_size]) for i in range(0, len(blocks), batch_size)]


def predicted_tokens(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)


def _batch(blocks: list[Block]) -> dict[str, torch.Tensor]:
    names = ("input_ids", "position_ids", "labels", "weights")
    return {name: torch.tensor([getattr(block, name) for block in blocks]) for name in names}


def model_inputs(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The arguments of a model's forward pass on packed rows."""
    # Without a mask and a cache, transformers reads the documents off position_ids.
    own = {name: batch[name] for name in ("input_ids", "position_ids")}
    return {**own, "attention_mask": None, "use_cache": False}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Packers' states in one, whose order does not depend on the parts'."""
    together = {key: value for part in parts for key, value in part.items()}
    return dict(sorted(together.items(), key=lambda item: int(item[0])))


@torch.no_grad()
def documents_leak(model: torch.nn.Module) -> bool:
    """Does changing one document of a packed block change the logits of the next one?

    Resetting positions is a request: an architecture or attention function that ignores it trains
    on text that runs from one document into another, and no loss curve says so.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    positions = torch.tensor([[*range(7), *range(9)]], device=device)
    first = torch.arange(16, device=device)[None]
    second = first.clone()
    second[0, :7] += 7
    try:
        batches = ({"input_ids": ids, "position_ids": positions} for ids in (first, second))
        one, two = (model(**model_inputs(batch)).logits[0, 7:] for batch in batches)
    finally:
        model.train(was_training)
    # Hidden keys add exact zeros; the allowance is for kernels that regroup their sums.
    return bool((one - two).abs().max() > 1e-4 * one.abs().max())
