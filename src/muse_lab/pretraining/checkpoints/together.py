"""Several ranks save and load one checkpoint through torch.distributed.checkpoint, each its own shards.

It plans who writes which part, writes replicated parts once, and on loading finds the files that a rank needs, whatever
ranks and mesh wrote them. Ranks exchange plans, and no tensors. The places of the parts are in the manifest: torch's
own metadata is a pickle, and has no hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Size, Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from muse_lab.pretraining.checkpoints.manifest import CheckpointError, StoredPart, StoredTensor, TensorKind
from muse_lab.pretraining.checkpoints.shards import Piece, box, copy_to_host, reading


class StagedTensors(DefaultSavePlanner):
    """A rank's parts of sharded tensors, copied to host memory: training may go on while they are written."""

    def __init__(self, tensors: Mapping[str, Tensor], *, is_first: bool) -> None:
        super().__init__(flatten_state_dict=False)
        super().set_up_planner(dict(tensors), is_coordinator=is_first)
        self._plan = super().create_local_plan()
        self._copies: dict[MetadataIndex, Tensor] = {}
        for item in self._plan.items:
            numbers = super().resolve_data(item)
            assert isinstance(numbers, Tensor)
            self._copies[item.index] = copy_to_host(numbers)
        self.state_dict: dict[str, Any] = {}  # the tensors are not needed any more

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """`__init__` has set up everything."""

    def create_local_plan(self) -> SavePlan:
        return self._plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies[write_item.index]


def save_together(
    tensors: StagedTensors,
    group: dist.ProcessGroup,
    *,
    begin: Callable[[], None],
    write: Callable[[Sequence[Piece]], list[StoredPart]],
    finish: Callable[[list[StoredPart]], None],
) -> None:
    """Write a checkpoint. Collective: every rank must call it; if it fails on one, all raise a CheckpointException.

    Args:
        group: a separate one, because the run exchanges gradients meanwhile
        begin: called first, on the first rank alone
        write: called on every rank, with its pieces
        finish: called last, on the first rank alone, with the parts of all ranks
    """
    save({}, storage_writer=_Writer(begin, write, finish), planner=tensors, process_group=group)


def load_together(targets: Mapping[str, Tensor], folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Fill tensors that are sharded over all ranks; each rank reads its own parts. Collective.

    Raises CheckpointError if that fails on any rank.
    """
    try:
        load(
            dict(targets),
            storage_reader=_Reader(folder, tensors),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
        )
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {cause}") from None


class _Plain:
    """What a writer and a reader have in common: plans stay as they are, and a checkpoint has no id."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class _Writer(_Plain, StorageWriter):
    def __init__(
        self,
        begin: Callable[[], None],
        write: Callable[[Sequence[Piece]], list[StoredPart]],
        finish: Callable[[list[StoredPart]], None],
    ) -> None:
        self._begin, self._write, self._finish = begin, write, finish

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._begin()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        pieces = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            numbers = planner.resolve_data(item)
            assert isinstance(numbers, Tensor)
            if numbers.numel():
                kind = TensorKind(tuple(data.size), numbers.dtype)
                pieces.append(Piece(item.index.fqn, kind, tuple(data.chunk.offsets), numbers))
        parts = self._write(pieces)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [WriteResult(MetadataIndex(part.name, part.chunk.offsets), part.file.size, part) for part in parts]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._finish([result.storage_data for rank_results in results for result in rank_results])


class _Reader(_Plain, StorageReader):
    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self._folder = folder
        self._tensors = tensors
        self._files = {
            MetadataIndex(name, chunk.offsets): chunk.file
            for name, tensor in tensors.items()
            for chunk in tensor.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.kind.dtype),
                    Size(tensor.kind.shape),
                    [ChunkStorageMetadata(Size(chunk.offsets), Size(chunk.sizes)) for chunk in tensor.chunks],
                )
                for name, tensor in self._tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        from safetensors import safe_open

        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for file, items in by_file.items():
            with reading(self._folder, file), safe_open(self._folder / file, "pt") as opened:
                for item in items:
                    part = opened.get_slice(item.storage_index.fqn)[box(item.storage_offsets, item.lengths)]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
