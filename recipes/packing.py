"""Packed blocks: no token lost, no label across documents, resumable to the token.

The documents of an epoch are put in a seeded order and laid end to end; every `block_size` tokens
make a block. Inside a block each document's positions start at 0, which is how transformers
recognises packed documents and keeps them from seeing each other. A document that does not fit
goes on in the next block, where it starts at 0 again: its tokens stay, and so does every label,
because labels are shifted here and the last token of a block is still asked for the document's
next one.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

IGNORED = -100  # what cross_entropy leaves out


@dataclass
class Block:
    """One row: `labels[i]` is the token after `input_ids[i]` in its document, or IGNORED."""

    input_ids: list[int]
    position_ids: list[int]
    labels: list[int]


class Packer:
    """An endless stream of blocks whose place is three integers.

    Args:
        documents: the texts.
        encode: text to token ids, special tokens included.
        block_size: tokens of a block.
        seed: of the order; every epoch has its own.
    """

    def __init__(
        self,
        documents: Sequence[str],
        encode: Callable[[str], list[int]],
        block_size: int,
        seed: int,
    ):
        self.documents, self.encode = documents, encode
        self.block_size, self.seed = block_size, seed
        self.load_state({"epoch": 0, "document": 0, "offset": 0})

    def state(self) -> dict[str, int]:
        """Epoch, place in its order, and tokens of that document already given out."""
        return {"epoch": self.epoch, "document": self.document, "offset": self.offset}

    def load_state(self, state: dict[str, int]) -> None:
        self.epoch, self.document, self.offset = (
            state[key] for key in ("epoch", "document", "offset")
        )
        self._shuffle()
        self._tokens = self.encode(self.documents[self.order[self.document]])

    def next_block(self) -> Block:
        block = Block([], [], [])
        while (room := self.block_size - len(block.input_ids)) > 0:
            rest = self._tokens[self.offset : self.offset + room + 1]
            piece, following = rest[:room], rest[1:]
            block.input_ids += piece
            block.position_ids += range(len(piece))
            block.labels += following + [IGNORED] * (len(piece) - len(following))
            self.offset += len(piece)
            if self.offset >= len(self._tokens):
                self._next_document()
        return block

    def _next_document(self) -> None:
        self.document, self.offset = self.document + 1, 0
        if self.document == len(self.documents):
            self.epoch, self.document = self.epoch + 1, 0
            self._shuffle()
        self._tokens = self.encode(self.documents[self.order[self.document]])

    def _shuffle(self) -> None:
        self.order = list(range(len(self.documents)))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(self.order)


def step_batches(
    packer: Packer, *, rank: int, ranks: int, batch_size: int, grad_accumulation: int
) -> list[dict[str, torch.Tensor]]:
    """One rank's micro-batches of one step.

    Every rank walks the same stream and keeps its rows, so a step sees the same blocks however
    they are divided over ranks and micro-batches, and the packer's state is the same everywhere.
    """
    blocks = [packer.next_block() for _ in range(ranks * batch_size * grad_accumulation)]
    starts = range(rank * batch_size, len(blocks), ranks * batch_size)
    return [_batch(blocks[start : start + batch_size]) for start in starts]


def predicted_tokens(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)


def _batch(blocks: list[Block]) -> dict[str, torch.Tensor]:
    names = ("input_ids", "position_ids", "labels")
    return {name: torch.tensor([getattr(block, name) for block in blocks]) for name in names}


@torch.no_grad()
def documents_leak(model: torch.nn.Module) -> bool:
    """Whether changing one document of a packed block changes the logits of the next one.

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
        one, two = (
            model(
                input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False
            ).logits[0, 7:]
            for ids in (first, second)
        )
    finally:
        model.train(was_training)
    # Hidden keys add exact zeros; the allowance is for kernels that regroup their sums.
    return bool((one - two).abs().max() > 1e-4 * one.abs().max())
