#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# megatron_min.  Copyright (c) 2026 The megatron_min authors, MIT licence.  This notice stays with
# copies of the file.
"""Megatron-LM's GPT data path in one file: from text to training batches, in resumable runs.

This module writes and reads the files that Megatron-LM trains on, and makes training batches from
them.  The reference is the package megatron-core 0.16.1, called "upstream" here.  Except where
upstream has a fault, this module and upstream make the same files, index arrays, caches, samples
and batches, bit for bit.

Part I explains the path of a token, like a textbook.  Each section asks a question and answers it
twice: first with a drawing or a table, then in code.  The code defines what happens to good input.
Most bad input is rejected by one-line calls to helper functions, most of them in section 13:
_check_...() raises an error (some of these also warn), _as_...() and _parse_...() also convert the
value, and _warn_...() only warns.  In a block "with _naming_place(place)", every error message
begins with place, which says where the bad value is.  Python's operator.index(n) converts any
integer, including numpy's, to int, and rejects floats.  Most other functions that are used before
their definition have a name that says what they do, or a comment.

The module needs only numpy and torch.  The optional accelerator, _helpers.c, gives identical
results.

Words       token           an integer that stands for a piece of text
            document        one text, or one sequence: see the box below
            eod             the token that marks the end of a document
            corpus          a collection of documents
            pair            the two files that hold one corpus, .bin and .idx
            sequence        consecutive tokens that the .idx lists as one entry
            record          the JSON file that preprocess() writes beside a pair; it names the
                            tokenizer and the inputs
            split           a part of a corpus, for training, validation or testing
            epoch           one reading of all sequences of a split
            stream          the sequences of all epochs, shuffled and concatenated; samples are cut
                            from it
            sample          one training example: its input tokens, labels and masks
            dataset         an object indexed by number.  The items of an IndexedDataset are
                            sequences; the items of every other dataset are samples
            index arrays    the arrays that say where in the corpora each sample is
            blend           corpora combined by weights; a weight is a corpus's share of the samples
            pass            one reading of all samples of a dataset, which may cover many epochs
            job             one set of processes, from its start to its end
            run             the training of one model; several jobs may continue it in turn
            rank            one process of a job, usually with one GPU
            dp rank         (data-parallel rank) the number of a rank's share of the samples; ranks
                            with the same dp rank use the same samples
            micro-batch     the samples that one dp rank reads at once
            padding sample  fills an incomplete micro-batch, and adds nothing to the loss
            round           one micro-batch on every dp rank
            step            one update of the model; it reads one or more rounds
            global batch    the samples of one step

  +-- "document" --------------------------------------------------------------------------------+
  | In sections 1 and 2, and in the tools of part IV, a document is a text.  Elsewhere, a        |
  | document is a sequence of the .idx file.  Upstream does the same, because a text is nearly   |
  | always one sequence.                                                                         |
  +----------------------------------------------------------------------------------------------+

Notation    S  input tokens of a sample (sequence_length)    D  documents in a split
            T  tokens in one epoch of a split                E  epochs over the split
            N  samples in a dataset                          x  1 if a sample has an extra token, so
                                                                its last input has a label; else 0
            j  index of a sample in the stream               k  index of a sample in its dataset
            d  index of a document in the stream (sections 4 and 5), or of a dataset in the blend
               (section 6)
            i  index of a sequence in a pair (sections 1 and 5), or of a sample in the blend
Examples    most use toy_corpus(), with the documents aaaa, bbb and cccccc, and set S to 4

Contents
Part I, the path of a token
  1. The file pair              where on disk are the tokens of sequence i?
  2. Text to tokens             how do lines of JSON become a pair?
  3. Split, blend, config       how is each corpus split, and in what proportions are corpora mixed?
  4. Index arrays               in what order are samples read, and where does each one start?
  5. GPTDataset                 what are the tokens, labels and masks of sample k?
  6. BlendedDataset             which sample of which dataset is sample i of the blend?
  7. The builder                which datasets does a config describe, and which rank builds first?
  8. Samplers                   which samples does a rank read, and how does a run resume?
  9. Parallel batches           which part of each batch does a rank get, and from where?
Part II, the training loop
  10. The loader and its state  how are batches prepared in advance, and what is in a checkpoint?
  11. Gradients                 how do all data-parallel ranks get the same gradients?
  12. Around the loop           how many samples does a run need, and how can a step be repeated?
Part III, the workshop
  13. What is checked           what is checked, when, and which error is raised?
  14. Complete files            how does a file appear complete, or not at all?
  15. The index cache           when can index arrays from an earlier job be used again?
  16. Object storage            how are tokens read over a network, or without memory mapping?
  17. One error for every rank  what do the other ranks do when one rank fails?
  18. The C kernels             which loops does C replace, and how is C switched on and off?
Part IV, the tools
  19. Tokenizers                which tokenizers can a command use?
  20. Preprocessing             how is a big corpus tokenized, on all cores and on many machines?
  21. Other data                how do mock data and conversations become samples?
  22. Audit                     which documents are in a sample, and which samples read a document?
  23. The command line          how is this module used from a shell?
"""

import _thread
import abc
import argparse
import array
import atexit
import bisect
import collections
import collections.abc
import concurrent.futures
import contextlib
import copy
import dataclasses
import difflib
import enum
import errno
import functools
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import numbers
import operator
import os
import pathlib
import pickle
import pkgutil
import re
import secrets
import shutil
import signal
import struct
import sys
import tempfile
import threading
import time
import typing
import warnings
import weakref
import zlib

import numpy as np
import torch
import torch.distributed
import torch.utils.data

__version__ = "0.1.0"

# fmt: off
__all__ = [
    # Names of upstream
    "DType", "get_idx_path", "get_bin_path", "IndexedDataset", "IndexedDatasetBuilder",
    "ObjectStorageConfig", "NullTokenizer", "Split", "normalize", "parse_and_normalize_split",
    "convert_split_vector_to_split_matrix", "get_blend_from_list", "BlendedMegatronDatasetConfig",
    "GPTDatasetConfig", "build_sample_idx", "MegatronDataset", "GPTDataset", "MockGPTDataset",
    "MockGPTLowLevelDataset", "build_blending_indices", "build_exhaustive_blending_indices",
    "BlendedDataset", "BlendedMegatronDatasetBuilder", "RerunDataIterator",
    "get_batch_on_this_cp_rank", "DistributedDataParallel", "finalize_model_grads",
    "forward_backward_no_pipelining",
    # Names of Megatron-LM's repository that are not in the package
    "SFTDataset", "MegatronPretrainingSampler", "MegatronPretrainingRandomSampler",
    "MegatronFullValidationSampler", "build_pretraining_data_loader", "cyclic_iter",
    "get_train_valid_test_num_samples", "get_batch", "get_batch_on_this_tp_rank",
    # Our own names
    "DatasetFormatError", "toy_corpus", "ByteTokenizer", "HuggingFaceTokenizer", "build_tokenizer",
    "encode_document", "encode_jsonl", "preprocess", "merge", "split_range", "count_samples",
    "plan_epochs", "shuffle", "build_document_index", "build_shuffle_index", "build_stable_orders",
    "causal_mask", "build_phase_indices", "batches_of", "PretrainingDataLoader", "NumMicroBatches",
    "check_data_consistency", "ParallelGroups", "Span", "trace", "find",
    "IMPLEMENTATION", "__version__",
]
# fmt: on

log = logging.getLogger("megatron_min")


# ==============================================================================
# PART I: THE PATH OF A TOKEN
# ==============================================================================
#
# ==============================================================================
# 1. The file pair
# ==============================================================================
# Question: where on disk are the tokens of sequence i?
#
# A corpus is stored in two files.  The .bin file holds the tokens of all sequences, concatenated.
# The .idx file says where each sequence is, and which sequences form each document.
#
#   corpus.bin   a a a a b b b c c c c c c      the tokens of all sequences, here one byte each
#                ^       ^     ^
#   corpus.idx   0       4     7                sequence_pointers: where each one begins, in bytes
#                4       3     6                sequence_lengths: how many tokens each one has
#                0       1     2           3    document_indices: the first sequence of each
#                                               document, then the number of sequences
#
# Usually both files are mapped into memory.  The tokens of sequence i are a slice of the .bin file:
#
#   first = sequence_pointers[i] // (bytes of a token)       i = 1:  4
#   count = sequence_lengths[i]                                      3
#   tokens[first : first + count]                                    b b b
#
# The .idx file describes n sequences.  document_indices has m entries.  All integers are
# little-endian.  Arrays are read and written as they are in memory, so the machine must be
# little-endian, too.
#
#   OFFSET      SIZE   FIELD
#   0           9      magic b"MMIDIDX\0\0"
#   9           8      version, uint64, always 1
#   17          1      dtype code of the .bin file, uint8 (see DType)
#   18          8      n, uint64
#   26          8      m, uint64
#   34          4n     sequence_lengths, int32
#   34+4n       8n     sequence_pointers, int64
#   34+12n      8m     document_indices, int64
#   34+12n+8m   n      sequence_modes, int8, only in multimodal files
#
# A mode is a small integer that says what kind of data a sequence holds, such as text or images.
# This module stores and returns modes; it does not interpret them.

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, n, m: the first 34 bytes


class DType(enum.Enum):
    """The dtypes that a .bin file may have.  The value of each is its code in the .idx header.

    >>> DType.code_from_dtype(np.uint16), DType.dtype_from_code(4), DType.size(8)
    (8, <class 'numpy.int32'>, 2)
    """

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: type) -> int:
        """Return the code of a numpy dtype.

        Raises ValueError if the format has no code for the dtype, and TypeError if numpy does not
        know the dtype.
        """
        name = np.dtype(value).name
        if name not in cls.__members__:
            raise ValueError(f"no dtype code for {name}: use one of {', '.join(cls.__members__)}")
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type:
        """Return the numpy type of a code.  Raises ValueError for an unknown code."""
        return getattr(np, cls(value).name)

    @staticmethod
    def size(key: int | type) -> int:
        """Return the size of one token in bytes; key is a code, a dtype or the name of a dtype."""
        if not isinstance(key, (type, np.dtype, str)):  # a code, of any integer type
            key = DType.dtype_from_code(operator.index(key))
        return np.dtype(key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type:
        """Return the dtype for a vocabulary size: uint16 below 65500, otherwise int32.

        The limit is upstream's.  None, an unknown size, gives int32.
        """
        if cardinality is not None and cardinality < 65500:
            return np.uint16
        return np.int32


def get_idx_path(path_prefix: str | os.PathLike) -> str:
    """Return the path of the index file: "corpus.idx" for the prefix "corpus"."""
    return f"{os.fsdecode(path_prefix)}.idx"


def get_bin_path(path_prefix: str | os.PathLike) -> str:
    """Return the path of the token file: "corpus.bin" for the prefix "corpus"."""
    return f"{os.fsdecode(path_prefix)}.bin"


class _MappedTokens:
    """The tokens of a .bin file that is mapped into memory.

    read() copies nothing: it returns a view, which keeps the mapping alive.  _FileTokens and
    _RemoteFile (section 16) also have read() and read_many().
    """

    def __init__(self, path: str | os.PathLike, dtype: type) -> None:
        self.tokens = _map_tokens(path, dtype)  # section 16: np.memmap(path, dtype, "r")

    def read(self, first: int, count: int) -> np.ndarray:
        """Return count tokens, starting at token number first of the file."""
        return self.tokens[first : first + count]

    def read_many(self, spans: typing.Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return what read() returns for each (first, count)."""
        return [self.read(first, count) for first, count in spans]


class IndexedDataset(torch.utils.data.Dataset):
    """Read a .bin/.idx pair.

    path_prefix            path of the pair without .bin or .idx, or its URL on object storage, such
                           as s3://bucket/corpus (section 16)
    multimodal             True: return modes, too; the .idx must hold them
    mmap                   True: map the .bin; each access returns a view of the mapping.  False:
                           each access reads a new array, as always on object storage
    object_storage_config  an ObjectStorageConfig, or None for its defaults
    check                  True: check every entry of the .idx at the start, as verify() does

    ds[i] is sequence i, a 1-D array of ds.dtype, and ds[a:b] is a list of such arrays.  With
    multimodal=True, ds[i] is (tokens, mode), and ds[a:b] is (list of tokens, array of modes).

    A file may be damaged, truncated or forged, so nothing is used unchecked.  Opening checks the
    header and the last entries, verify() checks every entry, and each access checks its bounds.
    Raises FileNotFoundError if a file is missing, DatasetFormatError (a ValueError) if a file does
    not follow the format, and IndexError for a position outside the dataset.

    >>> ds = IndexedDataset(toy_corpus())
    >>> len(ds), ds.sequence_lengths.tolist(), ds.sequence_pointers.tolist()
    (3, [4, 3, 6], [0, 4, 7])
    >>> ds.document_indices.tolist(), bytes(ds.get(2, offset=1, length=2))
    ([0, 1, 2, 3], b'cc')
    """

    def __init__(
        self,
        path_prefix: str | os.PathLike,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: typing.Any = None,
        *,
        check: bool = False,
    ) -> None:
        self.path_prefix = os.fsdecode(path_prefix)
        self.multimodal = multimodal
        self.mmap = mmap
        self.object_storage_config = object_storage_config or ObjectStorageConfig()
        self.check = check
        self.absolute_prefix = _absolute_path(self.path_prefix)  # stays valid after os.chdir()
        self._idx_path = get_idx_path(self.absolute_prefix)
        self._bin_path = get_bin_path(self.absolute_prefix)
        self._open()

    def _open(self):
        """Read the .idx and open the .bin.  (Loading a pickle calls this, too: section 15.)"""
        self._memo = {}  # cached results, such as that of verify()
        self._stamps = {}  # size and time of each file, noted when it is opened: section 15
        self._set_arrays(_read_idx(self))
        self._tokens, self.num_tokens = _open_tokens(self)  # a _MappedTokens, if it is mapped
        _remember_files(self)  # section 15: pickles leave out what is in the files
        if self.check:
            self.verify()

    def _set_arrays(self, content):
        """Set the dtype and the arrays of the .idx file, from its bytes (an array of uint8)."""
        _check_idx_header(self._idx_path, content, self.multimodal)
        _, _, code, n, m = _HEADER.unpack_from(content)
        self.dtype = DType.dtype_from_code(code)
        self._token_bytes = DType.size(self.dtype)
        self.sequence_lengths = np.frombuffer(content, np.int32, n, 34)
        self.sequence_pointers = np.frombuffer(content, np.int64, n, 34 + 4 * n)
        self.document_indices = np.frombuffer(content, np.int64, m, 34 + 12 * n)
        self.has_modes = len(content) > 34 + 12 * n + 8 * m
        self.sequence_modes = None
        if self.multimodal:
            self.sequence_modes = np.frombuffer(content, np.int8, n, 34 + 12 * n + 8 * m)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __repr__(self) -> str:
        size = f"sequences={len(self)}, tokens={self.num_tokens}"
        dtype = np.dtype(self.dtype).name
        return f"{type(self).__name__}({self.path_prefix!r}, {size}, dtype={dtype})"

    def __getitem__(self, idx: int | slice) -> typing.Any:
        if not isinstance(idx, slice):
            return self.get(idx)
        if idx.step not in (None, 1):
            raise ValueError(f"a slice of a dataset must have step 1, got step {idx.step}")
        sequences = self.get_many((i, 0, None) for i in range(len(self))[idx])
        if self.multimodal:
            return sequences, self.sequence_modes[idx]
        return sequences

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> typing.Any:
        """Return length tokens of sequence idx, starting at offset.

        If length is None, return all tokens up to the end of the sequence.  The result is a 1-D
        array of the file's dtype, or (tokens, mode) with multimodal=True.  Raises IndexError if
        these tokens are not all in the sequence.
        """
        first, count = self._span(idx, offset, length)
        tokens = self._tokens.read(first, count)
        if self.multimodal:
            return tokens, self.sequence_modes[operator.index(idx)]
        return tokens

    def get_many(self, pieces: typing.Iterable[tuple[int, int, int | None]]) -> list[np.ndarray]:
        """Return what get() returns for each (sequence, offset, length), without modes.

        If the pair is on object storage, the pieces are fetched in parallel.
        """
        return self._tokens.read_many([self._span(*piece) for piece in pieces])

    def _span(self, idx, offset, length):
        """Return where a part of a sequence is in the .bin, in tokens: (first, length)."""
        i = _as_index(idx, len(self), f"sequences of {self.path_prefix}")  # -1 is the last
        pointer = int(self.sequence_pointers[i])
        full_length = int(self.sequence_lengths[i])
        offset = operator.index(offset)
        length = full_length - offset if length is None else operator.index(length)
        _check_span(self, i, pointer, full_length, offset, length)
        return pointer // self._token_bytes + offset, length

    def verify(self) -> None:
        """Check every entry of the .idx, in O(n).  A second call does nothing.

        Raises DatasetFormatError if a length is negative, if a sequence does not begin where the
        sequence before it ends, or if a document begins before the preceding document.
        """
        if "verified" not in self._memo:
            _check_entries_of_idx(self)
            self._memo["verified"] = True

    @staticmethod
    def exists(path_prefix: str | os.PathLike) -> bool:
        """Return whether both files of the pair exist."""
        return _file_exists(get_idx_path(path_prefix)) and _file_exists(get_bin_path(path_prefix))

    @property
    def index(self) -> "IndexedDataset":
        """Return self.  (Upstream keeps the arrays of the .idx in a separate object.)"""
        return self

    @property
    def mapped_tokens(self) -> np.ndarray | None:
        """Return all tokens of the .bin as one array, or None if the .bin is not mapped."""
        if isinstance(self._tokens, _MappedTokens):
            return self._tokens.tokens
        return None

    def get_document_indices(self) -> np.ndarray:
        """Return document_indices."""
        return self.document_indices

    # ---- the identity of the pair, for caches and saved states.  (Section 15 has it, and sets the
    # methods that pickle calls.)

    def fingerprint(self) -> dict:
        """Return the sizes of the files, and checksums of parts of them, as a flat dict for JSON.

        Every copy of the pair has the same fingerprint.  An edit in the middle of the .bin that
        keeps its size is not detected.  The first call reads all sequence lengths and both ends of
        the .bin.
        """
        return _fingerprint_of_pair(self)


class IndexedDatasetBuilder(contextlib.AbstractContextManager):
    """Write a .bin/.idx pair.  The files have the same bytes as upstream's.

    bin_path     path of the token file, which has a temporary name until finalize()
    dtype        dtype of the stored tokens.  An id that does not fit an integer dtype is rejected,
                 never wrapped
    multimodal   True: store a mode (int8) for each sequence, too

    Use a builder in a with block.  When the block ends normally, finalize() writes the .idx beside
    the .bin; if the block raises, the new files are removed.  Without a with block, call finalize()
    yourself; a builder that is deleted before this call removes its file.

    Raises ValueError for invalid input, and TypeError for a length or mode that is not an integer.
    Invalid input is not written.  After a failed write, for example on a full disk, the builder
    accepts no more input, and finalize() raises ValueError.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     prefix = os.path.join(folder, "pair")
    ...     with IndexedDatasetBuilder(get_bin_path(prefix), np.uint16) as builder:
    ...         builder.add_document([97, 97, 98], [2, 1])       # two sequences, one document
    ...     IndexedDataset(prefix)[:], os.path.getsize(get_bin_path(prefix))
    ([array([97, 97], dtype=uint16), array([98], dtype=uint16)], 6)
    """

    def __init__(
        self, bin_path: str | os.PathLike, dtype: type = np.int32, multimodal: bool = False
    ) -> None:
        code = DType.code_from_dtype(dtype)  # rejects a dtype that has no code
        self.dtype = DType.dtype_from_code(code)
        self._token_dtype = np.dtype(self.dtype)
        self.multimodal = multimodal
        self.sequence_lengths = array.array("i")  # int32
        self.sequence_modes = array.array("b")  # int8
        self.document_indices = array.array("q", [0])  # int64
        self._bin = _NewFile(bin_path)  # gets its name when it is complete (section 14)
        self._is_final = False  # True once finalize() has written the pair

    def add_document(
        self, tensor: typing.Any, lengths: typing.Iterable[int], modes: typing.Any = None
    ) -> None:
        """Append a document.  tensor holds its tokens, and lengths says how to cut them.

        The sum of lengths must be the number of tokens.  Sequences that add_item() has added since
        the last end_document() belong to this document, too.
        """
        self.add_sequences(_encode_tokens(tensor, self._token_dtype), lengths, modes)
        self.end_document()

    def add_item(self, tensor: typing.Any, mode: int = 0) -> None:
        """Append one sequence of token ids: a tensor, an array or a list, which is flattened.

        The sequence belongs to the document that the next end_document() ends.
        """
        content = _encode_tokens(tensor, self._token_dtype)
        self.add_sequences(content, [len(content) // self._token_dtype.itemsize], [mode])

    def end_document(self) -> None:
        """End a document: the sequences that were added since the last end_document()."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_sequences(
        self, content: bytes, lengths: typing.Iterable[int], modes: typing.Any = None
    ) -> None:
        """Append sequences.  content is the bytes of their tokens, in the builder's dtype.

        lengths and modes have an entry for each sequence.  If modes is None, all modes are 0.  A
        builder that is not multimodal ignores modes.
        """
        lengths, modes = _as_lengths_and_modes(self, content, lengths, modes)  # both as array.array
        try:
            self._bin.write(content)
            self.sequence_lengths.extend(lengths)
            if self.multimodal:
                self.sequence_modes.extend(modes)
        except BaseException:
            self._bin.discard()  # it may have tokens without lengths now
            raise

    def add_index(self, path_prefix: str | os.PathLike) -> None:
        """Append all sequences and documents of a pair.

        Raises ValueError if the pair has a different dtype, if it has modes but this builder is not
        multimodal, or if it is the pair that is being written.  After an error during the copy, the
        builder accepts no more input.
        """
        _append_pair(self, path_prefix)  # section 20

    def finalize(self, idx_path: str | os.PathLike) -> None:
        """Write the .idx file and give both files their final names.

        Raises ValueError if sequences were added after the last end_document().  Raises OSError if
        a write fails; section 14 says which files exist then.  While it runs, this method needs 16
        bytes of memory for each sequence.
        """
        _check_finished(self)
        n = len(self.sequence_lengths)
        m = len(self.document_indices)
        code = DType.code_from_dtype(self.dtype)
        lengths = np.frombuffer(self.sequence_lengths, np.int32)
        num_bytes = lengths.astype(np.int64) * self._token_dtype.itemsize
        sequence_pointers = np.cumsum(num_bytes)
        sequence_pointers -= num_bytes  # where each sequence begins
        index = self._bin.partner(idx_path)  # another _NewFile
        try:
            index.write(_HEADER.pack(_MAGIC, _VERSION, code, n, m))
            index.write(lengths)
            index.write(sequence_pointers)
            index.write(self.document_indices)
            index.write(self.sequence_modes)  # empty unless multimodal
            _commit_pair(self._bin, index)
            self._is_final = True
        finally:
            index.discard()  # removes the file if it has no final name yet

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None and not self._is_final:
                prefix = self._bin.path.removesuffix(".bin")  # path is the final path
                self.finalize(get_idx_path(prefix))
        finally:
            self._bin.discard()  # removes the file unless finalize() has given it its final name


def _encode_tokens(values, dtype):
    """Return token ids (a tensor, array or list) as the bytes of a .bin file of this dtype.

    Raises ValueError for the first id that does not fit an integer dtype; upstream may wrap it.
    Floating-point dtypes round ids, and ids beyond their range become infinity.
    """
    if isinstance(values, torch.Tensor):
        values = values.numpy(force=True)  # from any device
    ids = np.asarray(values).ravel()
    if dtype.kind == "f":
        return ids.astype(dtype).tobytes()
    ids = _as_integers(ids, values)  # values are for the error message
    tokens = ids.astype(dtype)
    _check_ids_fit(ids, tokens)  # tokens equals ids, unless an id has wrapped
    return tokens.tobytes()


def toy_corpus(folder: str | os.PathLike | None = None) -> str:
    """Write the pair that most examples use, and return its prefix.

    Its documents are aaaa, bbb and cccccc.  Each token is the ASCII code of a letter.  If folder is
    None, the pair is in a new temporary folder, which is removed when the program ends.

    >>> [bytes(document).decode() for document in IndexedDataset(toy_corpus())]
    ['aaaa', 'bbb', 'cccccc']
    """
    if folder is None:
        folder = _temporary_folder()  # section 14
    prefix = os.path.join(os.fsdecode(folder), "toy")
    with IndexedDatasetBuilder(get_bin_path(prefix), np.uint8) as builder:
        for text in (b"aaaa", b"bbb", b"cccccc"):
            builder.add_document(list(text), [len(text)])
    return prefix


# ==============================================================================
# 2. Text to tokens
# ==============================================================================
# Question: how do lines of JSON become a pair?
#
#   a line of corpus.jsonl        its tokens         what is appended to the pair
#                                 ($ is eod, which   tokens       length     to document_indices,
#                                 append_eod adds)                           which begins with 0
#
#   {"text": "aaaa"}       ->     a a a a $      ->  a a a a $    5          1
#   {"text": ""}           ->     (no tokens)    ->                          1
#   {"text": "bbb"}        ->     b b b $        ->  b b b $      4          2
#
# Each line that is not blank is a document.  If its text is a str, the document becomes one
# sequence.  If its text is a list of sentences, each sentence that has tokens becomes one.  A
# document without tokens adds no sequence.  As in upstream, it still adds an entry to
# document_indices: the previous value again.
#
# The end-of-document token, eod, shows a model where one text ends and an unrelated text begins.
# It is appended only with append_eod=True, which is not the default.  Without eod tokens, three
# settings of section 5 have no effect: reset_position_ids, reset_attention_mask and eod_mask_loss.
#
# A tokenizer is any object with these attributes; there is no class to inherit from:
#
#   vocab_size           the highest id plus one; DType.optimal_dtype() chooses the dtype from it
#   eod                  the id that ends a document
#   tokenize(text)       takes a str, returns ids in a list, array or tensor
#   detokenize(ids)      takes ids in a list, array, tensor or iterator, returns a str
#   unique_identifiers   a dict that identifies the tokenizer; json must be able to write it.  The
#                        names of cache files depend on it (section 15), and records hold it
#
# encode_jsonl() needs vocab_size and tokenize(), and GPTDatasetConfig needs unique_identifiers.
# eod is needed for append_eod and for the three settings above.  These attributes are optional:
#
#   pad                  the id that pads a short sample
#   eos                  another special id
#   special_tokens_dict  {name: id} of all special tokens.  Section 5 compares pad with these ids
#   tokenize_batch       takes a list of str, returns the ids of each one.  It only saves time


class ByteTokenizer:
    """A tokenizer whose tokens are the UTF-8 bytes of a text, 0 to 255; eod is 256.

    It needs no files.  It makes about four times as many tokens as a trained tokenizer.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.tokenize("aaaa")
    [97, 97, 97, 97]
    >>> tokenizer.detokenize([98, 256])
    'b'
    """

    vocab_size = 257
    eod = 256
    unique_identifiers = {"class": "ByteTokenizer"}

    def tokenize(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text."""
        return list(text.encode("utf-8"))

    def tokenize_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the UTF-8 bytes of each text as an array, which is 8 times smaller than a list."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def detokenize(self, ids: typing.Iterable[int]) -> str:
        """Return the text of ids, without eod tokens; invalid UTF-8 becomes U+FFFD."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def encode_document(
    text: str | list[str], tokenizer: typing.Any, append_eod: bool = False
) -> list[list[int]]:
    """Return the sequences of one document, each a list of token ids; none is empty.

    text         a str, or a list of str.  Each str that has tokens becomes a sequence
    append_eod   True: append tokenizer.eod to the last sequence, if there is one

    >>> encode_document("bbb", ByteTokenizer(), append_eod=True)
    [[98, 98, 98, 256]]
    >>> encode_document(["aa", "", "b"], ByteTokenizer(), append_eod=True)
    [[97, 97], [98, 256]]
    """
    _check_text(text)
    sequences = []
    texts = [text] if isinstance(text, str) else text
    for sentence in texts:
        tokens = _as_ids(tokenizer, tokenizer.tokenize(sentence)).tolist()
        if len(tokens) > 0:
            sequences.append(tokens)
    if append_eod and len(sequences) > 0:
        sequences[-1].append(tokenizer.eod)
    return sequences


def encode_jsonl(
    input_path: str | os.PathLike,
    output_prefix: str | os.PathLike,
    tokenizer: typing.Any = None,
    *,
    json_key: str = "text",
    append_eod: bool = False,
) -> None:
    """Tokenize a file of JSON lines and write output_prefix.bin and output_prefix.idx.

    input_path     a file in UTF-8 with one JSON object on each line; blank lines are skipped
    output_prefix  path of the pair without .bin or .idx
    tokenizer      an object with vocab_size, tokenize() and, for append_eod, eod (the opening of
                   section 2 lists all attributes).  None: ByteTokenizer()
    json_key       the key of the text in each JSON object
    append_eod     True: append tokenizer.eod to each document that has tokens

    Raises ValueError, KeyError or TypeError if a line has no valid text.  Then no pair is written.
    preprocess() in section 20 writes the same bytes, on all cores, and names the bad line.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "corpus.jsonl")
    ...     _ = path.write_text('{"text": "aaaa"}\\n{"text": ""}\\n{"text": "bbb"}\\n')
    ...     encode_jsonl(path, os.path.join(folder, "corpus"), append_eod=True)
    ...     pair = IndexedDataset(os.path.join(folder, "corpus"))
    >>> pair[:]
    [array([ 97,  97,  97,  97, 256], dtype=uint16), array([ 98,  98,  98, 256], dtype=uint16)]
    >>> pair.document_indices.tolist()
    [0, 1, 1, 2]
    """
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    _check_tokenizer_of_corpus(tokenizer, append_eod)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    with IndexedDatasetBuilder(get_bin_path(output_prefix), dtype) as builder:
        # Lines are read as bytes: in text mode Python would also end a line at a lone "\r".
        with open(input_path, "rb") as file:
            for line in file:
                if line.isspace():
                    continue
                text = json.loads(line.decode("utf-8-sig"))[json_key]  # with or without a BOM
                for tokens in encode_document(text, tokenizer, append_eod):
                    builder.add_item(tokens)
                builder.end_document()  # a document may have no sequences


# ==============================================================================
# 3. Split, blend, config
# ==============================================================================
# Question: how is each corpus split, and in what proportions are corpora mixed?
#
# The setting "split" cuts every corpus into parts that have no sequence in common.  (A text of
# several sentences may be cut between two parts.)  Each of these parts is also called a split.  A
# blend combines corpora, each with a weight:
#
#   split "98,1,1"    wiki, 100 sequences    code, 1000 sequences
#   train             0 .. 97                0 .. 979
#   valid             98                     980 .. 989
#   test              99                     990 .. 999
#
#   weights           30                     70
#
# Each split is blended with these weights: in train, in valid and in test, 3 of 10 samples are from
# wiki and 7 are from code.  A config holds the split, the blend, and other settings; section 5
# adds more of them.


class Split(enum.Enum):
    """The three parts of a corpus."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: typing.Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, in float64.

    >>> normalize([30, 70])
    [0.3, 0.7]
    """
    weights = np.array(weights, np.float64)
    return (weights / np.sum(weights)).tolist()


def parse_and_normalize_split(split: str) -> list[float]:
    """Parse a string with the shares of train, valid and test, and return them normalized.

    The string has one to three numbers, separated by commas, semicolons, slashes or spaces,
    optionally in brackets.  Missing shares are 0.  Raises ValueError for any other string, for a
    number that is negative or not finite, and if all numbers are 0.

    Upstream differs: it drops signs, exponents and empty fields.

    >>> parse_and_normalize_split("3,1")
    [0.75, 0.25, 0.0]
    """
    fields = re.split(r"\s*[,;/]\s*|\s+", str(split).strip("[]() "))
    with _naming_place(f'split {split!r} (write, for example, "98,1,1")'):
        shares = [float(field) for field in fields]
        shares += [0.0] * (len(Split) - len(shares))
        _check_weights(shares, Split.__members__)  # three numbers; none negative, not all 0
    return normalize(shares)


def convert_split_vector_to_split_matrix(
    vector_a: typing.Sequence[float], vector_b: typing.Sequence[float] | None = None
) -> list[tuple[float, float] | None]:
    """Return (begin, end) of each split, as fractions of a corpus, or None if the split is empty.

    vector_a   the shares of train, valid and test; their sum is 1
    vector_b   must be None.  (Upstream accepts the shares of a second split.)

    >>> convert_split_vector_to_split_matrix([0.75, 0.25, 0.0])
    [(0, 0.75), (0.75, 1.0), None]
    """
    if vector_b is not None:
        raise ValueError(f"vector_b is not supported: expected None, got {vector_b!r:.60}")
    matrix = []
    begin = 0
    for share in vector_a:
        end = begin + share
        matrix.append((begin, end) if begin < end else None)
        begin = end
    return matrix


def split_range(bounds: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """Turn fractions of a corpus into (first, end), a half-open range of its sequences.

    Both are rounded as round() does: a half, such as 48.5, goes to the even number.  A product
    that should be a half may be slightly off, because the fractions are floats.

    >>> split_range((0.98, 0.99), 100), split_range((0.98, 0.99), 1000), split_range((0, 0.5), 97)
    ((98, 99), (980, 990), (0, 48))
    """
    begin, end = bounds
    n = operator.index(num_sequences)
    return round(begin * n), round(end * n)


def get_blend_from_list(
    blend: typing.Sequence[str] | None,
) -> tuple[list[str], list[float] | None] | None:
    """Parse a list of prefixes, or of alternating weights and prefixes: return (prefixes, weights).

    If the list has only prefixes, weights is None.  Decimal numbers are weights, so write ./2023
    for a folder 2023.  Raises ValueError for any other list.  For None, return None.

    Upstream differs: it guesses what a list of another form means.

    >>> get_blend_from_list(["30", "p1", "70", "p2"]), get_blend_from_list(["2023_01", "wiki"])
    ((['p1', 'p2'], [30.0, 70.0]), (['2023_01', 'wiki'], None))
    """
    if blend is None:
        return None
    entries = [os.fsdecode(entry) if isinstance(entry, bytes) else str(entry) for entry in blend]
    entries = [entry.strip() for entry in entries]
    is_weight = [_is_decimal(entry) for entry in entries]
    if len(entries) > 0 and not any(is_weight):
        return entries, None
    _check_alternating(is_weight)
    return entries[1::2], [float(weight) for weight in entries[0::2]]


@dataclasses.dataclass
class BlendedMegatronDatasetConfig:
    """Settings that say which datasets to build.

    There are three ways to name the data:

      blend and split   one list of corpora; split cuts each corpus into train, valid and test
      blend_per_split   a separate list of whole corpora for each of train, valid and test
      neither           mock data (see MockGPTDataset in section 21)

    On a first reading, read only the fields under Data.  They answer the question of this section.
    The sections that use the other fields explain them.

    Data
      blend             (prefixes, weights).  weights is a list of numbers or None, which weights
                        each corpus by its number of samples
      split             shares of train, valid and test, such as "98,1,1"
      blend_per_split   a list of three: for train, valid and test, a blend or None
      blend_phases      [(samples, weights), ...]: weights that change during training, instead of
                        the weights of train (section 6).  Keyword only.  Not in upstream

      Instead of a list, any Python sequence may be given, such as OmegaConf's ListConfig.

    Samples
      random_seed       seed of the shuffles of section 4
      sequence_length   S, in tokens
      tokenizer         an object as described in section 2; section 5 uses its eod and pad
      allow_ambiguous_pad_tokens
                        True: treat all tokens that equal the pad id as padding, even if another
                        special token, such as eod, has the same id (section 5)

    Validation
      multiple_validation_sets
                        True: build one validation dataset per corpus instead of a blend, so that
                        each gets its own loss (section 7).  Needs blend_per_split
      full_validation   True: each of several validation datasets must cover one epoch, so the
                        builder accepts only None as the size of valid, which requests one epoch
                        (section 7).  (The loader of section 10 has a setting with the same name)

    Building and reading
      mid_level_dataset_surplus
                        how many extra samples to build for each corpus of a blend with weights or
                        phases, as a fraction of its target (section 7)
      num_dataset_builder_threads
                        how many corpora to build in parallel (section 7)
      path_to_cache     folder for the cached index arrays (section 15).  None: each corpus is
                        cached in <prefix>/cache/<class>_indices or, if it is a URL, beside the
                        local copy of its .idx.  Blends are then not cached
      mmap_bin_files    False: read the .bin with os.pread instead of mapping it (section 16)

    Computed, not arguments
      split_matrix      (begin, end) of each split, as fractions of a corpus, or None if empty; with
                        blend_per_split, None
      mock              True if neither blend nor blend_per_split is given; split is then "1,1,1"

    Names and defaults are upstream's, except blend_phases.  fast_cache_load and
    defer_npy_index_mmap are accepted and ignored.

    Raises ValueError for an invalid field, and for fields that contradict each other.

    >>> config = BlendedMegatronDatasetConfig(1234, 4, blend=(["p1", "p2"], [30, 70]), split="3,1")
    >>> config.split_matrix, config.mock
    ([(0, 0.75), (0.75, 1.0), None], False)
    """

    random_seed: int
    sequence_length: int
    blend: tuple | None = None
    blend_per_split: list | None = None
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    split: str | None = None
    split_matrix: list | None = dataclasses.field(init=False, default=None)
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    mock: bool = dataclasses.field(init=False, default=False)
    tokenizer: object | None = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool | None = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False
    blend_phases: list | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.blend_per_split is not None and not any(self.blend_per_split):
            self.blend_per_split = None  # [None, None, None] means the same as None
        _check_config(self)
        # as Python's ints, whose JSON text is a part of the names of cache files (section 15)
        self.random_seed = _as_whole(self.random_seed, "random_seed", 0, 2**32 - 1)
        self.sequence_length = _as_whole(self.sequence_length, "sequence_length", 1, 2**32 - 1)
        if self.blend_per_split is not None:
            return
        self.mock = self.blend is None
        if self.mock:
            self.split = "1,1,1"
        shares = parse_and_normalize_split(self.split)
        self.split_matrix = convert_split_vector_to_split_matrix(shares)


# ==============================================================================
# 4. Index arrays
# ==============================================================================
# Question: in what order are samples read, and where does each one start?
#
# Three index arrays hold the answer.  (A document is a sequence of the .idx file here: see the box
# at the front.)
#
# (1) document_index holds the documents of the split, repeated for each epoch and shuffled.
#     Concatenated in this order, they are the stream.
# (2) sample_index cuts the stream into samples of S + x tokens, which start S tokens apart.  Row j
#     says where sample j starts.
# (3) shuffle_index shuffles the samples, too.  Sample k of the dataset is sample shuffle_index[k]
#     of the stream.
#
# The drawing shows step (2) for the toy corpus, with its documents in file order.  d counts the
# documents of the stream from 0.  A sample with the row (d, offset) starts offset tokens after the
# start of document d.  Here the rows are (0, 0) (1, 0) (2, 1) (2, 5).  The last row says where
# sample 3 would start.
#
#   d         0       1     2              sample 0 = a a a a b    inputs a a a a   labels a a a b
#   stream    a a a a b b b c c c c c c    sample 1 = b b b c c    inputs b b b c   labels b b c c
#   offset    0 1 2 3 0 1 2 0 1 2 3 4 5    sample 2 = c c c c c    inputs c c c c   labels c c c c
#
# With S = 4 and x = 1, a sample has five tokens: four inputs, and an extra token, so that the last
# input has a label, too.  The next sample begins with this extra token, so no token is a label
# twice.  Only the first token of the stream is an input but never a label.
#
# The shuffles (1) and (3) can be done in upstream's way, or with stable_order.
#
# The arrays always cover whole epochs.  If samples for 1.1 epochs are requested, for example, two
# epochs are built, and a run that reads as many samples as it requested stops after 1.1 epochs.  If
# both epochs were shuffled together, it would have read about 55 % of each.  So upstream shuffles
# all epochs together only if about 80 % of the last one, or more, are needed (plan_epochs() has the
# rule).  Otherwise the last epoch is shuffled separately, and comes last.
#
# So a longer run may read other samples, from the first one on.  This happens even if only a
# separate last epoch is added, because its documents are shuffled before the samples, with the same
# generator.
#
# With stable_order, a field of the config in section 5, each epoch is shuffled separately and has
# its own seed.  So additional epochs leave the order of the earlier ones unchanged:
#
#   documents 0 1 2, seed 2    upstream, together    stable_order
#   1 epoch                    2 1 0                 2 1 0
#   2 epochs                   1 1 0 2 2 0           2 1 0 | 0 2 1
#   3 epochs                   1 1 0 2 0 0 2 1 2     2 1 0 | 0 2 1 | 1 0 2
#
# The samples (3) are shuffled in the same groups of epochs as the documents.  A sample that begins
# in one epoch and ends in the next belongs to the epoch in which it ends.


def count_samples(
    tokens: int,
    sequence_length: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> int:
    """Count the samples in a stream with the given number of tokens, in exact integers.

    tokens                       number of tokens in the stream
    sequence_length              S, the number of inputs in a sample
    drop_last_partial_sequence   False: inputs left over at the end form a last, short sample
    add_extra_token_to_sequence  x.  True: a sample has S + 1 tokens, and the next sample begins
                                 with the last of them

    >>> count_samples(13, 4), count_samples(14, 4, drop_last_partial_sequence=False)
    (3, 4)
    """
    inputs = max(0, operator.index(tokens) - int(add_extra_token_to_sequence))
    whole, rest = divmod(inputs, operator.index(sequence_length))
    if rest and not drop_last_partial_sequence:
        return whole + 1
    return whole


class EpochPlan(typing.NamedTuple):
    """The result of plan_epochs()."""

    num_epochs: int  # E
    num_samples: int  # N: all samples of these epochs, at least as many as were requested
    separate_final_epoch: bool  # whether the last epoch is shuffled separately
    samples_before_final_epoch: int  # samples that end before the last epoch begins; 0 if E is 1


def plan_epochs(
    tokens_per_epoch: int,
    num_samples: int | None,
    sequence_length: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> EpochPlan:
    """Return how many epochs give the requested samples, and what follows from it.

    tokens_per_epoch   T
    num_samples        how many samples are requested.  None or 0: as many as one epoch has
    other arguments    as in count_samples()

    The number of epochs E is the smallest integer >= 1 with E*T >= num_samples*S + x.

    If E > 1 and fewer than int(0.80 * samples_per_epoch) samples of the last epoch are needed, this
    epoch is shuffled separately.  samples_per_epoch counts the full samples of one epoch.  The
    factor is upstream's.

    Raises ValueError if samples are requested and T is 0.

    Upstream: GPTDataset._get_num_epochs
    Upstream differs: it never returns if T is 0.

    >>> # One epoch of 13 tokens has 3 samples.  Two epochs have 6, enough for the 4 requested.
    >>> plan = plan_epochs(tokens_per_epoch=13, num_samples=4, sequence_length=4)
    >>> plan.num_epochs, plan.num_samples, plan.separate_final_epoch
    (2, 6, True)
    """
    S = operator.index(sequence_length)
    tokens_per_epoch = operator.index(tokens_per_epoch)
    x = int(add_extra_token_to_sequence)
    num_epochs = 1
    if num_samples:
        num_samples = operator.index(num_samples)  # a numpy integer would wrap in the product
        _check_has_tokens(tokens_per_epoch, num_samples)
        num_epochs = max(1, _ceil_div(num_samples * S + x, tokens_per_epoch))
    all_tokens = num_epochs * tokens_per_epoch
    all_samples = count_samples(all_tokens, S, drop_last_partial_sequence, x)
    if num_epochs == 1:
        return EpochPlan(1, all_samples, False, 0)
    before_final = count_samples(all_tokens - tokens_per_epoch, S, True, x)
    needed_of_final = num_samples - before_final
    samples_per_epoch = count_samples(tokens_per_epoch, S, True, x)
    separate = needed_of_final < int(0.80 * samples_per_epoch)
    return EpochPlan(num_epochs, all_samples, separate, before_final)


def shuffle(items: np.ndarray, random_state: np.random.RandomState) -> None:
    """Shuffle a 1-D array in place, as numpy does.

    For i = n-1 down to 1, swap item i with an item chosen uniformly from items 0 .. i.  Section 18
    replaces this function with a faster one.

    >>> items = np.arange(6, dtype=np.int32)
    >>> shuffle(items, np.random.RandomState(1234)); items.tolist()
    [2, 1, 5, 0, 4, 3]
    """
    random_state.shuffle(items)


def build_document_index(
    documents: typing.Any,
    num_epochs: int,
    random_state: np.random.RandomState,
    separate_final_epoch: bool,
) -> np.ndarray:
    """Repeat the documents once for each epoch, and shuffle them.

    documents             ints (D,): numbers of the split's documents
    num_epochs            E
    random_state          the generator that shuffles
    separate_final_epoch  True: shuffle the last epoch separately, and keep it last

    Return int32 (E*D,).  Raises ValueError unless the documents are integers from 0 to 2**31 - 1.

    Upstream: _build_document_index

    >>> build_document_index([0, 1, 2], 2, np.random.RandomState(1234), False).tolist()
    [2, 1, 2, 0, 1, 0]
    """
    document_index = np.tile(_as_document_numbers(documents), num_epochs)
    if not separate_final_epoch:
        shuffle(document_index, random_state)
        return document_index
    edge = len(document_index) - len(documents)
    shuffle(document_index[:edge], random_state)
    shuffle(document_index[edge:], random_state)
    return document_index


def build_sample_idx(
    sizes: np.ndarray,
    document_indices: np.ndarray,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> np.ndarray:
    """Build sample_index: where each sample starts in the stream.

    Sample j is the tokens [j*S, j*S + S + x) of the stream.  A short last sample ends with the
    stream.

    sizes             int32: the sequence_lengths of the .idx file
    document_indices  int32 (E*D,): the document_index.  (Upstream's name.  This is not the
                      document_indices of an .idx file.)
    sequence_length   S, at least 1
    num_epochs        E
    tokens_per_epoch  T
    drop_last_partial_sequence, add_extra_token_to_sequence
                      as in count_samples()

    Return int32 (N+1, 2), or int64 if E*D is 2**31 or more.  Row j is (d, offset): sample j starts
    offset tokens after the start of the d-th document of the stream.  Row N is where another sample
    would start: x tokens before the end of sample N - 1.

    Raises TypeError if an array has the wrong dtype, and IndexError if a document is not in sizes.
    Raises ValueError if an array is not 1-D, if S < 1, if a length is negative, or if the documents
    have fewer tokens than the samples need.

    Cost: O(N log(E*D) + E*D) time; in C, O(N + E*D) time.  A row needs 8 bytes, or 16 as int64.

    >>> sizes = np.array([4, 3, 6], np.int32)               # aaaa bbb cccccc
    >>> documents = np.arange(3, dtype=np.int32)
    >>> build_sample_idx(sizes, documents, 4, 1, 13).tolist()
    [[0, 0], [1, 0], [2, 1], [2, 5]]
    >>> # Without the extra token, bbbc starts at (0, 4), the end of aaaa; see _fill_rows().
    >>> build_sample_idx(sizes, documents, 4, 1, 13, add_extra_token_to_sequence=False).tolist()
    [[0, 0], [0, 4], [2, 1], [2, 5]]
    """
    S = _as_whole(sequence_length, "sequence_length", 1)
    x = int(add_extra_token_to_sequence)
    tokens = operator.index(num_epochs) * operator.index(tokens_per_epoch)
    document_index = document_indices
    _check_array(sizes, "sizes", np.int32)
    _check_array(document_index, "document_indices", np.int32)
    N = count_samples(tokens, S, drop_last_partial_sequence, x)
    rows = np.empty((N + 1, 2), _sample_index_dtype(len(document_index)))
    end_of_last = min(N * S + x, tokens) if N else 0  # a short last sample ends with the stream
    _fill_rows(rows, sizes, document_index, S, x, end_of_last)
    if x == 0 and N * S > tokens:  # an oddity of upstream, which changes no sample
        _skip_empty_documents(rows, sizes, document_index)
    return rows


def _fill_rows(rows, sizes, document_index, S, x, end_of_last):
    """Fill in the rows of a sample_index.  Section 18 replaces this function with a faster one.

    Row 0 is (0, 0).  For each later row j: if x is 1, sample j starts with the last token of sample
    j - 1; if x is 0, it starts just after this token.  In both cases, the row names the document
    that has this token.  So if x is 0, a row may point to the end of a document, as in upstream.

    Sample j - 1 ends j*S + x tokens into the stream, or at end_of_last if it is short.
    """
    _check_document_index(document_index, sizes)
    lengths = sizes[document_index]
    _check_lengths(lengths, end_of_last)
    sample_ends = np.minimum(np.arange(1, len(rows)) * S + x, end_of_last)
    document_ends = np.cumsum(lengths, dtype=np.int64)
    document_starts = document_ends - lengths
    d = np.searchsorted(document_ends, sample_ends)  # the first document that ends there or later
    rows[0] = 0
    rows[1:, 0] = d
    rows[1:, 1] = sample_ends - x - document_starts[d]


def _skip_empty_documents(rows, sizes, document_index):
    """If only empty documents follow the last row, make it point to the last of these.

    The row still means the same place in the stream.  A row that points into a document stays.
    """
    d, offset = rows[-1].tolist()
    if offset == sizes[document_index[d]] and not sizes[document_index[d + 1 :]].any():
        rows[-1] = len(document_index) - 1, sizes[document_index[-1]]


def _sample_index_dtype(num_documents):
    """Return int32, or int64 if d may not fit int32.  Offsets fit, because sizes are int32."""
    return np.int32 if num_documents < 2**31 else np.int64


def build_shuffle_index(
    num_samples: int, total_size: int, random_state: np.random.RandomState
) -> np.ndarray:
    """Shuffle 0 .. N - 1 in two parts: the first num_samples numbers, and the rest.

    num_samples   size of the first part: N or, if the last epoch is shuffled separately, the number
                  of samples that end before it begins
    total_size    N
    random_state  the generator that shuffles

    Return uint32 (N,), or int64 if N is 2**32 - 2 or more.

    Upstream: _build_shuffle_index

    >>> build_shuffle_index(3, 6, np.random.RandomState(3)).tolist()     # 0 1 2 stay before 3 4 5
    [1, 0, 2, 3, 5, 4]
    """
    total_size = operator.index(total_size)
    shuffle_index = np.arange(total_size, dtype=_shuffle_index_dtype(total_size))
    shuffle(shuffle_index[:num_samples], random_state)
    shuffle(shuffle_index[num_samples:], random_state)
    return shuffle_index


def _shuffle_index_dtype(num_samples):
    """Return upstream's dtype, with upstream's limit, for the numbers 0 .. N - 1."""
    return np.uint32 if num_samples < 2**32 - 2 else np.int64


def build_stable_orders(
    documents: typing.Any, sample_edges: typing.Sequence[int], random_seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle each epoch separately: its documents, then the samples that end in it.

    Epoch 0 has the seed random_seed, so a dataset of one epoch has upstream's order.  A later epoch
    e has the seed [random_seed, e].  A short last sample, if it is kept, is shuffled together with
    the last epoch.  The order of this epoch may therefore be different in a longer dataset.

    documents     ints (D,): numbers of the split's documents
    sample_edges  E + 1 ints: samples sample_edges[e] .. sample_edges[e + 1] - 1 of the stream end
                  in epoch e.  The last entry is N
    random_seed   an int from 0 to 2**32 - 1

    Return document_index, int32 (E*D,), and shuffle_index, uint32 or int64 (N,).  Raises ValueError
    unless the documents are integers from 0 to 2**31 - 1.

    >>> for sample_edges in [0, 3], [0, 3, 6], [0, 3, 6, 9]:          # 1, 2 and 3 epochs
    ...     document_index, shuffle_index = build_stable_orders([0, 1, 2], sample_edges, 2)
    ...     print(document_index.tolist(), shuffle_index.tolist())
    [2, 1, 0] [2, 0, 1]
    [2, 1, 0, 0, 2, 1] [2, 0, 1, 5, 4, 3]
    [2, 1, 0, 0, 2, 1, 1, 0, 2] [2, 0, 1, 5, 4, 3, 6, 8, 7]
    """
    num_documents = len(documents)
    num_epochs = len(sample_edges) - 1
    document_index = np.tile(_as_document_numbers(documents), num_epochs)
    N = operator.index(sample_edges[-1])
    shuffle_index = np.arange(N, dtype=_shuffle_index_dtype(N))
    random_state = np.random.RandomState()
    for epoch in range(num_epochs):
        random_state.seed([random_seed, epoch] if epoch > 0 else random_seed)
        first_document = epoch * num_documents
        shuffle(document_index[first_document : first_document + num_documents], random_state)
        shuffle(shuffle_index[sample_edges[epoch] : sample_edges[epoch + 1]], random_state)
    return document_index, shuffle_index


# ==============================================================================
# 5. GPTDataset
# ==============================================================================
# Question: what are the tokens, labels and masks of sample k?
#
#   k --shuffle_index--> j --sample_index[j], [j + 1]--> (d, offset) .. (d', offset')
#     --document_index[d .. d']--> pieces of sequences in the file pair --joined--> S + x tokens
#
# The example is sample k = 0 of the toy corpus with seed 1234.  It is sample j = 1 of the stream in
# section 4.  (The shuffle happens to leave the three documents in file order.)  sample_index has
# the rows (0, 0) (1, 0) (2, 1) (2, 5), and shuffle_index is 1 2 0:
#
#   stream, counted        0 1 2 3 4 5 6 7 8 9 . . .       k = 0: j = 1, rows (1, 0) and (2, 1)
#                          a a a a b b b c c c c c c
#   pieces of k = 0                b b b c c               (sequence 1, offset 0, 3 tokens) and
#                                                          (sequence 2, offset 0, 2 tokens)
#   tokens                         b b b c                 all but the last of the five
#   labels                           b b c c               all but the first
#
# A sample may contain the end of one document and the start of the next.  Fields of the config say
# how the two are kept apart, and where a new part of the sample starts:
#
#   field                     a part starts            effect
#   reset_position_ids        after an eod token       positions count from 0 again
#   reset_attention_mask      after an eod token       no attention to earlier parts
#   inter_document_masking    where a document starts  positions count from 0 again; cu_seqlens
#                                                      lists the starts, instead of a mask, for
#                                                      attention kernels that read such lists
#
# cu_seqlens (cumulative lengths) always has S + 1 entries; unused ones hold S.  Documents that
# start at 0 and 3, with S = 4, give cu_seqlens 0 3 4 4 4; max_seqlen, the length of the longest
# part, is 3.  With inter_document_masking, reset_position_ids has no effect, and
# reset_attention_mask is an error.
#
# The pad id is the tokenizer's pad.  It is -1, which matches no token, if the tokenizer has no pad,
# or if another special token has the same id (see _pad_id_of_config()).
#
# A label that equals the pad id never counts in the loss.  With eod_mask_loss, neither does a label
# whose input token is eod.  In a sample, tokens and labels that equal the pad id become 0.
#
# ds[None] returns a padding sample: sample 0 with a loss_mask of zeros.  Padding samples fill up a
# micro-batch that has too few samples (section 8).
#
# The three index arrays depend on which sequences are in the split, and on their lengths.  Beyond
# that, they depend only on the number of samples requested, S, x, the seed, stable_order, and
# whether a short last sample is kept.  So they are built once and cached in files (section 15),
# which all ranks and all later jobs read.


@dataclasses.dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of GPTDataset, in addition to those in BlendedMegatronDatasetConfig.

    The tokenizer is required and must have unique_identifiers.

    Texts that end with eod (the tokenizer must have an eod)
      reset_position_ids     True: positions restart after every eod token.  (None means False.)
      reset_attention_mask   True: no token attends across an eod token.  Needs the dense mask
      eod_mask_loss          True: no loss where the input token is eod

    Attention
      create_attention_mask  True: return the dense (1, S, S) mask, which says for each token which
                             tokens it may not attend to
      inter_document_masking
                             True: return cu_seqlens and max_seqlen instead of a mask, and restart
                             positions at each document.  Keyword only.  Not in upstream

    Samples
      drop_last_partial_validation_sequence
                             False: keep the last, short sample of valid, and pad it
      add_extra_token_to_sequence
                             True: x = 1, so the last input token has a label, too
      stable_order           True: shuffle each epoch separately, so that a longer dataset begins
                             with the samples of a shorter one.  (If the shorter one keeps a short
                             last sample, the order of its last epoch may change.)  Keyword only.
                             Not in upstream

    Other
      object_storage_cache_path
                             local folder for copies of .idx files (section 16)
      context_parallel_size  used only by SFTDataset (section 21)

    data_parallel_size, sequence_parallel_size and sequences_per_dataset are accepted and ignored.
    token_dtype_code is always None.  hybrid_context_parallel must be False.

    Raises ValueError for an unsuitable tokenizer, and for fields that contradict each other.

    >>> GPTDatasetConfig(1234, 4, tokenizer=ByteTokenizer()).has_dense_mask
    True
    """

    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    object_storage_cache_path: str | None = None
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    hybrid_context_parallel: bool = False
    sequences_per_dataset: dict | None = None
    token_dtype_code: int | None = dataclasses.field(init=False, default=None)
    context_parallel_size: int | None = None
    inter_document_masking: bool = dataclasses.field(default=False, kw_only=True)
    stable_order: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_config_of_samples(self)

    @property
    def has_dense_mask(self) -> bool:
        """Return whether a sample holds a (1, S, S) attention mask."""
        return bool(self.create_attention_mask and not self.inter_document_masking)


class MegatronDataset(abc.ABC, torch.utils.data.Dataset):
    """Base class of the datasets that the builder (section 7) can build.

    dataset        the opened data, as build_low_level_dataset() returned them
    dataset_path   the path that they were opened from, or None
    indices        numbers of the documents in this split: ints (D,) or, as an argument, a range
    num_samples    how many samples are requested.  None or 0: as many as one epoch has
    index_split    Split
    config         BlendedMegatronDatasetConfig

    A subclass defines

      __len__(), __getitem__(k)                       number of samples, and sample k
      build_low_level_dataset(dataset_path, config)   open the data
      numel_low_level_dataset(low_level_dataset)      number of documents in the opened data
    """

    def __init__(
        self,
        dataset: typing.Any,
        dataset_path: str | os.PathLike | None,
        indices: np.ndarray | range,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = None if dataset_path is None else os.fsdecode(dataset_path)
        # indices, as a range if possible, because a range needs no memory (section 15)
        self._documents = _as_range(indices)
        self.num_samples = _as_size(num_samples, "num_samples")
        self.index_split = index_split
        self.config = config
        _set_identifiers_of_dataset(self)  # unique_identifiers names the cache files: section 15

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def __getitem__(self, idx: int | None) -> dict:
        """Return sample idx.  For None, return the padding sample, whose loss does not count."""

    def __repr__(self) -> str:
        what = f"{type(self).__name__}({self.dataset_path!r}, {self.index_split.name}"
        size = f"samples={len(self)}, sequence_length={self.config.sequence_length}"
        return f"{what}, {size}{_label_of_epochs(self)})"

    @functools.cached_property
    def indices(self) -> np.ndarray:
        """Return the numbers of the documents in this split."""
        if isinstance(self._documents, range):
            return np.arange(self._documents.start, self._documents.stop, dtype=np.int32)
        return self._documents

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> typing.Any:
        """Open the data at dataset_path.  The builder calls this."""
        raise NotImplementedError(
            "build_low_level_dataset() is missing; define it in the class passed to the builder"
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: typing.Any) -> int:
        """Return how many documents the opened data have.  The builder divides them into splits."""
        raise NotImplementedError(
            "numel_low_level_dataset() is missing; define it in the class passed to the builder"
        )

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Return config fields on which the names of cache files depend, as in upstream.

        Subclasses may add fields.  Section 15 adds other settings that change the index arrays.
        """
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]


class GPTDataset(MegatronDataset):
    """Samples of S tokens, cut from the stream of shuffled documents.

    indexed_dataset   IndexedDataset, or any object with sequence_lengths and get(i, offset, length)
    dataset_path      path prefix of the corpus, or None.  The names of cache files depend on it
    indexed_indices   the argument indices of MegatronDataset, under upstream's name
    num_samples       as in MegatronDataset; the dataset may have more samples
    index_split       Split
    config            GPTDatasetConfig

    ds[k] is a dict of new tensors:

      tokens, labels           int64 (S,)
      attention_mask           bool (1, S, S), True: may not attend.  Only with
                               create_attention_mask, and not with inter_document_masking
      loss_mask                float32 (S,), 0: the loss of this label does not count
      position_ids             int64 (S,)
      cu_seqlens, max_seqlen   int32 (S+1,) and ().  Only with inter_document_masking

    ds[None] is the padding sample: sample 0 with a loss_mask of zeros.  Raises IndexError for a
    sample that does not exist.  A sample costs one read for each document that it touches.  On
    object storage, the reads of a batch are made in parallel.

    The index arrays of section 4 are attributes:

      document_index           int32 (E*D,)
      sample_index             int32 or int64 (N+1, 2)
      shuffle_index            uint32 or int64 (N,)
      epoch_plan               EpochPlan, or None if a subclass builds the arrays itself

    A subclass may override

      __getitem__(k)                                return sample k, with any keys
      _query_document_sample_shuffle_indices(k)     return (tokens, sequences) of sample k, and
                                                    optionally, as a third value, the lengths of
                                                    its documents
      _build_document_sample_shuffle_indices()      return the three index arrays

    >>> prefix = toy_corpus()
    >>> config = GPTDatasetConfig(1234, 4, blend=([prefix], None), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> documents = np.arange(3, dtype=np.int32)
    >>> ds = GPTDataset(IndexedDataset(prefix), prefix, documents, 3, Split.train, config)
    >>> ds.document_index.tolist()
    [0, 1, 2]
    >>> ds.sample_index.tolist(), ds.shuffle_index.tolist()
    ([[0, 0], [1, 0], [2, 1], [2, 5]], [1, 2, 0])
    >>> ds.pieces(0)                # all of sequence 1, then two tokens of sequence 2
    [(1, 0, 3), (2, 0, 2)]
    >>> ByteTokenizer().detokenize(ds[0]["tokens"]), ByteTokenizer().detokenize(ds[0]["labels"])
    ('bbbc', 'bbcc')
    """

    index_names = ("document_index", "sample_index", "shuffle_index")  # for section 15

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | os.PathLike | None,
        indexed_indices: np.ndarray | range,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        # set before super(), which makes the names of cache files from them
        self._x = int(config.add_extra_token_to_sequence)
        is_valid = index_split.name == "valid"
        self._keeps_short = is_valid and not config.drop_last_partial_validation_sequence
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        self._pad_token_id = _pad_id_of_config(config)
        self.eod_token_id = None  # only set if a field needs it
        if config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss:
            self.eod_token_id = config.tokenizer.eod

        self.epoch_plan = None
        arrays = self._build_document_sample_shuffle_indices()
        self.document_index, self.sample_index, self.shuffle_index = arrays

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    # ---- from k to the tokens and labels of sample k

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        # only a subclass returns more than two values
        ids, _, *more = self._query_document_sample_shuffle_indices(0 if idx is None else idx)
        return self._make_sample(idx, ids, more[0] if more else None)

    def __getitems__(self, indices: typing.Sequence[int | None]) -> list[dict]:
        """Return [self[idx] for idx in indices], but faster.  torch's DataLoader calls this."""
        return _read_gpt_samples(self, indices)  # section 10

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of sample idx, int64 (S + x,), and the sequence of each of its pieces.

        The name is upstream's.  If a subclass returns fewer tokens, they are padded.  If it also
        returns the lengths of the documents, inter_document_masking uses them.
        """
        pieces = self.pieces(idx)
        ids = np.concatenate(_read_pieces(self.dataset, pieces), dtype=np.int64)
        return self._pad(ids), np.array([i for i, _, _ in pieces], np.int64)

    def pieces(self, k: int) -> list[tuple[int, int, int]]:
        """Return where the tokens of sample k are: [(sequence, offset, length), ...], in order.

        The piece of an empty document has length 0.  Without the extra token, a row of sample_index
        may point to the end of a document.  The first piece of that sample then has length 0.
        """
        k = _as_index(k, len(self), f"samples of {_label_of_dataset(self)}")
        j = operator.index(self.shuffle_index[k])
        rows = self.sample_index[j : j + 2].tolist()
        _check_rows_of_sample(self, k, j, rows)
        (first_d, first_offset), (last_d, last_offset) = rows  # where this and the next one start
        sequences = self.document_index[first_d : last_d + 1].tolist()
        pieces = []
        for d, i in enumerate(sequences, first_d):
            begin = first_offset if d == first_d else 0
            if d < last_d:
                end = int(self.dataset.sequence_lengths[i])
            else:
                end = last_offset + self._x  # with x = 1, the next sample's first token, too
            pieces.append((i, begin, end - begin))
        return pieces

    def _pad(self, ids):
        """Return the tokens of a sample as int64, padded to S + x.  Raises TypeError for floats."""
        ids = np.asarray(ids).astype(np.int64, casting="same_kind", copy=False)
        missing = self.config.sequence_length + self._x - len(ids)
        if missing == 0:
            return ids
        _check_sample_fits(self, ids)
        return np.append(ids, np.full(missing, self._pad_token_id))

    def _make_sample(self, idx, ids, lengths=None):
        """Make the dict of sample idx from the ids of its tokens.

        If idx is None, make the padding sample, from the ids of sample 0.  lengths are the lengths
        of the documents in the sample.  None: the lengths of its pieces.
        """
        config = self.config
        S = config.sequence_length
        pad = self._pad_token_id
        # Here, too, because section 10 does not call _query_...(), and a subclass's may not pad.
        ids = self._pad(ids)
        tokens = ids[:S].copy()
        labels = ids[1:].copy()
        if not self._x:  # the last input has no label
            labels = np.append(labels, pad)
        equals_pad = labels == pad
        loss_mask = np.ones(S, np.float32)
        loss_mask[equals_pad] = 0
        if config.eod_mask_loss:  # the label of an eod is the first token of the next text
            loss_mask[tokens == self.eod_token_id] = 0
        if idx is None:
            loss_mask[:] = 0

        eod_starts = [0]
        if self.eod_token_id is not None:
            eods = np.flatnonzero(tokens[:-1] == self.eod_token_id)  # a last eod starts no part
            eod_starts += (eods + 1).tolist()
        mask_starts = eod_starts if config.reset_attention_mask else [0]
        if config.inter_document_masking:
            if lengths is None:
                lengths = [length for _, _, length in self.pieces(0 if idx is None else idx)]
            position_starts = _starts_of_documents(lengths, S)
        else:
            position_starts = eod_starts if config.reset_position_ids else [0]

        # Padding becomes 0, a valid id.  As in upstream, so do real tokens that equal the pad id.
        tokens[tokens == pad] = 0
        labels[equals_pad] = 0
        sample = {"tokens": tokens, "labels": labels}
        if config.has_dense_mask:
            sample["attention_mask"] = causal_mask(mask_starts, S)
        sample["loss_mask"] = loss_mask
        sample["position_ids"] = _positions_from(position_starts, S)
        if config.inter_document_masking:
            sample["cu_seqlens"] = np.full(S + 1, S, np.int32)
            sample["cu_seqlens"][: len(position_starts)] = position_starts
            sample["max_seqlen"] = np.array(np.diff([*position_starts, S]).max(), np.int32)
        return {key: torch.from_numpy(values) for key, values in sample.items()}

    # ---- how the index arrays are built

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the index arrays, and set epoch_plan.  A subclass may override this method."""
        # Section 15 loads them from the cache, or calls _build_arrays() and saves them.
        self.epoch_plan, arrays = _load_or_build_dataset_arrays(self)
        return arrays

    def _build_arrays(self):
        """Build the index arrays of section 4: return the epoch plan and a list of the arrays."""
        _check_corpus(self)
        config = self.config
        S = config.sequence_length
        lengths = self.dataset.sequence_lengths
        tokens_per_epoch = _count_tokens(lengths, self._documents)
        drop_last = not self._keeps_short
        with _naming_place(f"{_label_of_dataset(self)}, {self.index_split.name}"):
            plan = plan_epochs(tokens_per_epoch, self.num_samples, S, drop_last, self._x)
        if config.stable_order:
            # edges[e] is the number of samples that end before epoch e begins
            epochs = range(plan.num_epochs)
            edges = [count_samples(e * tokens_per_epoch, S, True, self._x) for e in epochs]
            edges.append(plan.num_samples)
            document_index, shuffle_index = build_stable_orders(
                self.indices, edges, config.random_seed
            )
        else:
            # one generator shuffles the documents first, and then the samples
            random_state = _random_state(config.random_seed)  # section 18: RandomState(random_seed)
            document_index = build_document_index(
                self.indices, plan.num_epochs, random_state, plan.separate_final_epoch
            )
            first_part = plan.num_samples
            if plan.separate_final_epoch:
                first_part = plan.samples_before_final_epoch
            shuffle_index = build_shuffle_index(first_part, plan.num_samples, random_state)
        sample_index = build_sample_idx(
            lengths, document_index, S, plan.num_epochs, tokens_per_epoch, drop_last, self._x
        )
        return plan, [document_index, sample_index, shuffle_index]

    # ---- what the builder calls

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> IndexedDataset:
        """Open the pair at dataset_path."""
        _check_has_prefix(dataset_path)
        storage = ObjectStorageConfig(config.object_storage_cache_path)
        mmap = config.mmap_bin_files
        return IndexedDataset(dataset_path, mmap=mmap, object_storage_config=storage)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return the number of documents, which are the sequences of the pair."""
        return len(low_level_dataset)


def _pad_id_of_config(config):
    """Return the id that pads short samples.

      the tokenizer has                              the id is
      no pad                                         -1
      a pad that differs from all special tokens     the pad
      a pad that is also a special token's id        -1, with a warning
      the same, with allow_ambiguous_pad_tokens      the pad

    The special tokens are those in special_tokens_dict, without "pad_token".  If there are none,
    they are eos and eod.  Labels that equal the pad id have no loss, so they should not be real
    tokens, such as eod.
    """
    tokenizer = config.tokenizer
    pad = _attribute_of(tokenizer, "pad")  # None if the tokenizer has no pad (section 19)
    if pad is None:
        return -1
    special = dict(_attribute_of(tokenizer, "special_tokens_dict") or {})
    special.pop("pad_token", None)
    if not special:
        special = {name: _attribute_of(tokenizer, name) for name in ("eos", "eod")}
    same = [name for name, token in special.items() if token == pad]
    if same and not config.allow_ambiguous_pad_tokens:
        _warn_of_ambiguous_pad(pad, same)
        return -1
    return int(pad)


def _count_tokens(sequence_lengths: np.ndarray, documents: np.ndarray | range) -> int:
    """Return the number of tokens of the documents."""
    if isinstance(documents, range):  # a slice copies no lengths
        documents = slice(documents.start, documents.stop)
    return int(sequence_lengths[documents].sum(dtype=np.int64))


def _read_pieces(reader: typing.Any, pieces: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """Return the tokens of each piece.  On object storage, the pieces are read in parallel."""
    if type(reader) is IndexedDataset:  # a subclass may override get()
        return reader.get_many(pieces)
    return [reader.get(*piece) for piece in pieces]


def causal_mask(starts: typing.Sequence[int], sequence_length: int) -> np.ndarray:
    """Return the mask of one sample, bool (1, S, S): True where row i may not attend to column j.

    A token attends to itself and to the earlier tokens of its part.  starts are the positions at
    which the parts of the sample start; the first is 0.  The mask has S * S bytes.

    Upstream: a part of _get_ltor_masks_and_position_ids

    >>> causal_mask([0, 2], 4)[0].astype(int)              # two parts of two tokens
    array([[0, 1, 1, 1],
           [0, 0, 1, 1],
           [1, 1, 0, 1],
           [1, 1, 0, 0]])
    """
    mask = np.triu(np.ones((sequence_length, sequence_length), bool), 1)  # the future
    for begin, end in itertools.pairwise(starts):
        mask[end:, begin:end] = True  # no later token may attend to this part
    return mask[None]


def _starts_of_documents(lengths: typing.Iterable[int], sequence_length: int) -> list[int]:
    """Return the positions in a sample at which documents of these lengths start.

    Empty documents are left out.  So is a document that starts at the extra token, which is not an
    input.  Padding belongs to the last document.

    >>> _starts_of_documents([3, 0, 2], 4), _starts_of_documents([4, 1], 4)
    ([0, 3], [0])
    """
    starts = [0]
    size = 0
    for length in lengths:
        if length and 0 < size < sequence_length:
            starts.append(size)
        size += length
    return starts


def _positions_from(starts: typing.Sequence[int], sequence_length: int) -> np.ndarray:
    """Return each token's position in its part, int64 (S,).  starts is as in causal_mask().

    >>> _positions_from([0, 2], 5).tolist()
    [0, 1, 0, 1, 2]
    """
    positions = np.arange(sequence_length)
    if len(starts) > 1:
        positions -= np.repeat(starts, np.diff([*starts, sequence_length]))
    return positions


# ==============================================================================
# 6. BlendedDataset
# ==============================================================================
# Question: which sample of which dataset is sample i of the blend?
#
# Each sample comes from the dataset with the largest lag: the dataset whose number of samples so
# far is furthest below its share.
#
# The lag of a dataset is weight * max(i, 1), minus the number of samples that it gave before sample
# i.  (Because of max, sample 0 comes from the dataset with the largest weight.)  Ties go to the
# lowest d.
#
#   weights 0.25, 0.75    sample i of the blend    0     1     2     3
#                         lag of dataset 0         .25   .25  -.5   -.25
#                         lag of dataset 1         .75  -.25   .5    .25
#                         dataset_index            1     0     1     1       the largest lag
#                         dataset_sample_index     0     0     1     2       its next sample
#
# So at any point in the blend, each dataset has given close to its share of the samples.
#
# A blend may have phases with different weights.  In each phase the rule counts from 0 again, and
# each dataset continues after its last sample:
#
#   phases                (4, [1, 3])       (4, [1, 1])
#   sample i              0  1  2  3        4  5  6  7
#   dataset_index         1  0  1  1        0  1  0  1
#   dataset_sample_index  0  0  1  2        1  3  2  4
#
# So adding or changing a phase leaves the entries of the earlier phases unchanged.  But a corpus
# may then have to give more samples, and without stable_order this may change the order in which it
# gives them (section 4).


def build_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: typing.Sequence[float],
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill in, for each sample of a blend, which dataset it comes from, and its index there.

    Sample i comes from the dataset with the largest lag, as defined above.  Lags are computed in
    IEEE doubles.  Ties go to the lowest d.  The sum of the weights must be 1, as normalize() makes
    it.  Rounding decides which of two nearly equal lags is larger, so even the last bit of a weight
    matters.  As in upstream, a dataset of weight 0 may win a tie; BlendedDataset drops such
    datasets.

    dataset_index         int16 (size,), filled in: the dataset of each sample
    dataset_sample_index  int64 (size,), filled in: the number of the sample in its dataset
    weights               float64 (num_datasets,), at least 0: the shares; their sum is 1
    num_datasets          1 to 32,766
    size                  number of samples in the blend
    verbose               accepted and ignored

    Raises TypeError if an array has the wrong dtype, and ValueError if an array is not 1-D, or if
    weights or num_datasets are out of range.

    >>> which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    >>> build_blending_indices(which, sample, [0.25, 0.75], 2, 4)
    >>> which.tolist(), sample.tolist()
    ([1, 0, 1, 1], [0, 0, 1, 2])
    """
    shares = np.array(weights[:num_datasets], np.float64)
    _check_blending(dataset_index, dataset_sample_index, shares, num_datasets)
    no_limits = np.full(len(shares), np.inf)
    _fill_blend(dataset_index, dataset_sample_index, shares, no_limits, size)


def build_exhaustive_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    sizes: typing.Sequence[int],
    num_datasets: int,
) -> None:
    """Fill in a blend that takes exactly sizes[d] samples of each dataset d, evenly spread.

    The rule is that of build_blending_indices(), with the weights sizes[d] / sum(sizes).  A
    dataset that has given all its samples is no longer considered.

    dataset_index, dataset_sample_index
                   int16 and int64 (sum(sizes),), filled in as in build_blending_indices()
    sizes          int64 (num_datasets,), at least 0
    num_datasets   1 to 32,766

    Raises TypeError if an array has the wrong dtype.  Raises ValueError if an array is not 1-D, if
    sizes are negative or not whole, or if num_datasets is out of range.

    >>> which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    >>> build_exhaustive_blending_indices(which, sample, [1, 3], 2); which.tolist()
    [1, 0, 1, 1]
    """
    counts = _as_counts(sizes[:num_datasets])
    size = sum(counts.tolist())  # in Python's integers: a sum in int64 might overflow
    _check_blending(dataset_index, dataset_sample_index, counts, num_datasets)
    shares = counts / np.float64(max(size, 1))
    _fill_blend(dataset_index, dataset_sample_index, shares, counts.astype(np.float64), size)


def _fill_blend(dataset_index, dataset_sample_index, shares, limits, size):
    """Fill in a blend in which dataset d gives at most limits[d] samples.

    Section 18 replaces this function with a faster one.
    """
    taken = np.zeros(len(shares), np.int64)  # samples that each dataset has given
    for i in range(size):
        lags = np.where(taken < limits, shares * max(i, 1) - taken, -np.inf)
        d = np.argmax(lags)
        dataset_index[i] = d
        dataset_sample_index[i] = taken[d]
        taken[d] += 1


def build_phase_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    phases: typing.Sequence[tuple[int, typing.Sequence[float]]],
) -> None:
    """Fill in a blend of several phases.

    Each phase follows the rule of build_blending_indices().  Only datasets whose weight in this
    phase is not 0 are considered.

    dataset_index, dataset_sample_index
             int16 and int64 (size,), filled in as in build_blending_indices()
    phases   [(samples, weights), ...].  The sum of all samples is size.  weights has one entry for
             each dataset; its sum is 1

    Raises TypeError if an array has the wrong dtype.  Raises ValueError if an array is not 1-D, if
    a weight is negative, infinite or nan, or if all weights of a phase are 0.

    >>> which, sample = np.zeros(8, np.int16), np.zeros(8, np.int64)
    >>> build_phase_indices(which, sample, [(4, [0.25, 0.75]), (4, [0.5, 0.5])])
    >>> which.tolist(), sample.tolist()
    ([1, 0, 1, 1, 0, 1, 0, 1], [0, 0, 1, 2, 1, 3, 2, 4])
    """
    taken = np.zeros(len(phases[0][1]), np.int64)  # samples of each dataset in the earlier phases
    begin = 0
    for count, weights in phases:
        count = operator.index(count)
        shares = np.array(weights, np.float64)
        limits = np.where(shares > 0, np.inf, 0.0)  # without it, a weight of 0 could win a tie
        which = dataset_index[begin : begin + count]
        numbers = dataset_sample_index[begin : begin + count]
        _check_blending(which, numbers, shares, len(taken))
        _check_phase_has_weight(count, weights)
        _fill_blend(which, numbers, shares, limits, count)
        numbers += taken[which]  # in place: numbers is a view
        taken += np.bincount(which, minlength=len(taken))
        begin += count


def _drop_zero_weights(items, weights, names):
    """Return the items whose weights are not 0, and these weights.  Log the names of the rest."""
    used = [d for d, weight in enumerate(weights) if weight]
    dropped = [str(name) for d, name in enumerate(names) if not weights[d]]
    if dropped:
        log.warning("dropped from the blend because their weight is 0: %s", ", ".join(dropped))
    return [items[d] for d in used], [weights[d] for d in used]


class BlendedDataset(torch.utils.data.Dataset):
    """A blend of datasets, in which each gives its share of the samples.

    datasets   MegatronDatasets of one split, at most 32,766
    weights    finite numbers >= 0.  A dataset of weight 0 is dropped, and the log names it
    size       number of samples.  None: weights are counts, and dataset d gives exactly weights[d]
               samples
    config     BlendedMegatronDatasetConfig
    phases     [(samples, weights), ...] instead of weights and size, which must then be None.  A
               dataset whose weights are all 0 keeps its number, because a later phase may use it.
               Keyword only.  Not in upstream

      made with               .size    .weights    .phases             built by
      weights and size        size     normalized  None                build_blending_indices
      weights alone           None     counts      None                build_exhaustive_...
      one phase, no weight 0  the sum  normalized  None                build_blending_indices
      other phases            the sum  None        normalized weights  build_phase_indices

    One phase without a weight of 0 is a plain blend, so it has the same cache files as in upstream.

    ds[i] is {"dataset_id": int64 (), **sample}.  Two attributes say which sample this is:

      dataset_index          int16 (size,)   the index of its dataset, which dataset_id repeats
      dataset_sample_index   int64 (size,)   the index of the sample in that dataset

    ds[None] is the padding sample of the dataset that sample 0 comes from.

    Raises ValueError if a dataset has fewer samples than the blend takes from it.

    Upstream differs: it raises IndexError instead, and only during the run.

    >>> prefix = toy_corpus()
    >>> config = GPTDatasetConfig(1234, 4, blend=([prefix], None), split="1",
    ...                           tokenizer=ByteTokenizer())
    >>> documents = np.arange(3, dtype=np.int32)
    >>> dataset = GPTDataset(IndexedDataset(prefix), prefix, documents, 3, Split.train, config)
    >>> blend = BlendedDataset([dataset, dataset], [1, 3], 4, config)
    >>> blend.dataset_index.tolist(), blend.dataset_sample_index.tolist()
    ([1, 0, 1, 1], [0, 0, 1, 2])
    """

    index_names = ("dataset_index", "dataset_sample_index")  # for section 15

    def __init__(
        self,
        datasets: typing.Sequence[MegatronDataset],
        weights: typing.Sequence[float] | None,
        size: int | None,
        config: BlendedMegatronDatasetConfig,
        *,
        phases: list | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self.config = config
        self._set_shares(weights, size, phases)
        self.split = self.datasets[0].index_split

        _set_identifiers_of_blend(self)  # unique_identifiers names the cache files: section 15
        self._taken = None  # see samples_taken()
        self.dataset_index, self.dataset_sample_index = self._build_indices()
        # raises _BlendTooLarge, a ValueError.  The builder (section 7) catches it, and rebuilds the
        # datasets that are too small
        _check_blend_fits(self.datasets, self.samples_taken().tolist())

    def _set_shares(self, weights, size, phases):
        """Set size, weights and phases as in the table above, and drop datasets of weight 0."""
        names = [_label_of_dataset(dataset) for dataset in self.datasets]
        _check_shares(self.datasets, weights, size, phases)
        self.phases = None
        self.size = None
        if phases is None:
            _check_weights(weights, names)
            self.datasets, weights = _drop_zero_weights(self.datasets, weights, names)
            if size is not None:
                self.size = _as_size(size, "size")
                # Normalize again, although the builder already has.  Upstream does so, too, and
                # this may change the last bit.
                self.weights = normalize(weights)
            else:
                self.weights = _as_counts(weights, "weights").tolist()
        else:
            phases = _as_normalized_phases(phases, names)
            _, first_weights = phases[0]
            is_plain = len(phases) == 1 and all(first_weights)
            self.size = sum(samples for samples, _ in phases)
            self.weights = first_weights if is_plain else None
            self.phases = None if is_plain else phases

    def __len__(self) -> int:
        return sum(self.weights) if self.size is None else self.size

    def __repr__(self) -> str:
        """Describe the blend and, one per line, its first 20 datasets."""
        lines = [f"{type(self).__name__}({self.split.name}, samples={len(self)})"]
        taken = self.samples_taken()
        for d, dataset in enumerate(self.datasets[:20]):
            size = f"samples={taken[d]}{_label_of_epochs(dataset)}"
            lines.append(f"  {d}: {_label_of_dataset(dataset)}, {size}")
        if len(self.datasets) > 20:
            lines.append(f"  and {len(self.datasets) - 20} more")
        return "\n".join(lines)

    # ---- the two index arrays, cached as in GPTDataset

    def _build_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the two index arrays, and set _taken.  A subclass may override this method."""
        # Section 15 loads them from the cache, or calls _build_arrays() and saves them.
        self._taken, arrays = _load_or_build_blend_arrays(self)
        return arrays

    def _build_arrays(self):
        """Build the index arrays: return how many samples each dataset gives, and both arrays."""
        arrays = [np.zeros(len(self), np.int16), np.zeros(len(self), np.int64)]
        if self.size is None:
            build_exhaustive_blending_indices(*arrays, self.weights, len(self.datasets))
        elif self.phases is not None:
            build_phase_indices(*arrays, self.phases)
        else:
            build_blending_indices(*arrays, self.weights, len(self.datasets), self.size)
        return _samples_per_dataset(arrays[0], len(self.datasets)), arrays

    def samples_taken(self) -> np.ndarray:
        """Return how many samples the blend takes from each dataset, int64 (datasets,)."""
        if self._taken is None:  # a subclass has overridden _build_indices()
            self._taken = _samples_per_dataset(self.dataset_index, len(self.datasets))
        return np.array(self._taken, np.int64)

    # ---- sample i

    def __getitem__(self, idx: int | None) -> dict:
        d, k = self._locate(idx)
        dataset_id = torch.from_numpy(np.array(d, np.int64))  # on the CPU, as all tensors here
        return {"dataset_id": dataset_id, **self.datasets[d][k]}

    def __getitems__(self, indices: typing.Sequence[int | None]) -> list[dict]:
        """Return [self[idx] for idx in indices], but faster.  torch's DataLoader calls this."""
        return _read_blend_samples(self, indices)  # section 10

    def _locate(self, idx):
        """Return (d, k): sample idx is sample k of dataset d.  If idx is None, so is k."""
        i = _as_index(0 if idx is None else idx, len(self), "samples of the blend")
        k = None if idx is None else int(self.dataset_sample_index[i])
        return int(self.dataset_index[i]), k


# ==============================================================================
# 7. The builder
# ==============================================================================
# Question: which datasets does a config describe, and which rank builds first?
#
# For each of train, valid and test, the user requests a size: a number of samples, or None.  In a
# blend with weights, let w be the weight of a corpus, divided by the sum of all weights.  The
# corpus has a target of ceil(size * w) samples, and is built with a surplus: ceil(target * (1 +
# mid_level_dataset_surplus)).  For example, if the size is 1,000 and the weights are 30 and 70, the
# targets are 300 and 700, and with a surplus of 0.005, 302 and 704 samples are requested from the
# corpora.
#
# The first row that applies says what the builder makes:
#
#   condition                              the builder makes           requested from each corpus
#   no corpora, or an empty share          None
#   blend_phases (only for train)          a blend of all phases       sum of the targets in all
#                                                                      phases, plus surplus
#   multiple_validation_sets (for valid)   a list, with a dataset      size samples
#                                          for each corpus
#   one corpus without a weight            the dataset of the corpus   size samples
#   one corpus of blend_per_split          the dataset of the corpus   size samples
#   corpora without weights                a blend of size samples     one epoch
#   corpora with weights                   a blend of all targets      target, plus surplus
#
# A list of one dataset is replaced with the dataset.  Mock data (section 21) count as one corpus.
# A size of None or, as in upstream, 0 requests one epoch of a corpus.  A blend without weights is
# weighted by the corpora's numbers of samples.  If size is None or larger than their sum, the sum
# is used.  A blend with weights has as many samples as the sum of the targets, which may be a few
# more than size, as in upstream.  In phases, the targets follow from the number of samples of each
# phase.
#
# The rule of section 6 keeps to the weights only approximately, and may take more samples of a
# corpus than its target.  Hence the surplus.  If the rule takes more samples than a corpus has, the
# builder rebuilds only this corpus, with more samples.  (Upstream fails.)
#
# A blend with weights needs a number as its size.  With phases, the size is only checked: it must
# not exceed the number of samples of the phases.  If a number of samples is requested from a corpus
# without tokens, the build fails.  Corpora that have no sample in one epoch are left out of a blend
# without weights.  If one epoch is requested, but no corpus of the split has a sample, the split is
# None, and a warning says so.  With a size of 0 there is no warning, and the dataset of one corpus
# may be empty.
#
# In a job of several ranks, rank 0 builds first:
#
#   rank 0: build and write the cache  ->  other ranks: load the cache, or build if they find none
#
# Finally the ranks compare what they built, because a node may have an old copy of the corpora.


class _SplitPlan(typing.NamedTuple):
    """What to build for a split, as a row of the table above describes it."""

    split: Split
    prefixes: list  # path prefix of each corpus; [None] for mock data
    bounds: tuple[float, float]  # the part of each corpus that belongs to the split
    requested: list  # samples requested from each corpus; None: one epoch
    is_blend: bool = False  # True: a BlendedDataset.  False: a dataset for each corpus
    # These three are arguments of the BlendedDataset.  If it gets neither weights nor phases, the
    # weights are the corpora's numbers of samples.
    weights: list | None = None
    size: int | None = None
    phases: list | None = None


def _plans_of_splits(config, sizes):
    """Return a plan for each split that has a share and corpora, in the order of the splits."""
    _check_sizes(config, sizes)
    surplus = config.mid_level_dataset_surplus
    plans = []
    for split, size in zip(Split, sizes, strict=True):
        if config.blend_per_split is not None:
            bounds = (0.0, 1.0)
            blend = config.blend_per_split[split.value]
        else:
            bounds = config.split_matrix[split.value]
            blend = ([None], None) if config.mock else config.blend
        if bounds is None or blend is None:
            _warn_of_few_samples(split, 0, size)
            continue
        prefixes, weights = list(blend[0]), blend[1]
        if split is Split.train and config.blend_phases is not None:
            phases = _as_normalized_phases(config.blend_phases, prefixes)
            requested = [math.ceil(n * (1 + surplus)) for n in _targets_of_corpora(phases)]
            plan = _SplitPlan(split, prefixes, bounds, requested, is_blend=True, phases=phases)
        elif split is Split.valid and config.multiple_validation_sets:
            _check_size_of_sets(config, prefixes, size)
            plan = _SplitPlan(split, prefixes, bounds, [size] * len(prefixes))
        elif len(prefixes) == 1 and (weights is None or config.blend_per_split is not None):
            plan = _SplitPlan(split, prefixes, bounds, [size])
        elif weights is None:
            plan = _SplitPlan(split, prefixes, bounds, [None] * len(prefixes), True, size=size)
        else:
            _check_has_size(split, size)
            # a corpus of weight 0 is not even opened
            prefixes, weights = _drop_zero_weights(prefixes, weights, prefixes)
            weights = normalize(weights)
            targets = _targets_of_corpora([(size, weights)])
            requested = [math.ceil(n * (1 + surplus)) for n in targets]
            plan = _SplitPlan(split, prefixes, bounds, requested, True, weights, sum(targets))
        plans.append(plan)
    return plans


def _targets_of_corpora(phases):
    """Return the target of each corpus, summed over phases: [(samples, weights), ...]."""
    targets = [0] * len(phases[0][1])
    for samples, weights in phases:
        for d, weight in enumerate(weights):
            targets[d] += math.ceil(samples * weight)
    return targets


class BlendedMegatronDatasetBuilder:
    """Build the train, valid and test datasets that a config describes.

    cls               a MegatronDataset class, such as GPTDataset
    sizes             what to request from train, valid and test: a number of samples, or None for
                      one epoch of each corpus.  A blend with weights needs a number, and may have a
                      few samples more.  0 makes an empty blend (or None, if it has no weights and
                      no corpus has a sample); from a single corpus, it requests one epoch.  A blend
                      of phases always has all samples of its phases
    is_built_on_rank  function without arguments that returns whether this rank needs the datasets.
                      It is called only with torch.distributed.  If it returns False, build()
                      returns [None, None, None].  (Rank 0 builds in any case, to write the cache.)
    config            settings for cls.  The builder copies it, so later changes have no effect

    With torch.distributed, every rank must call build(), even if it needs no datasets.  (In
    Lightning, call it in setup(), which runs on every rank, and not in prepare_data().)

    In this example both corpora are the toy corpus, with 3 samples per epoch.  With the surplus, 2
    samples are requested from corpus 0, and 4 from corpus 1.  Four samples need a second epoch,
    which changes their order.

    >>> config = GPTDatasetConfig(1234, 4, blend=([toy_corpus(), toy_corpus()], [1, 3]), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config)
    >>> train, valid, test = builder.build()
    >>> [(sample["dataset_id"].item(), bytes(sample["tokens"].tolist())) for sample in train]
    [(1, b'cccc'), (0, b'bbbc'), (1, b'bbbc'), (1, b'aaaa')]
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: typing.Sequence[int | None],
        is_built_on_rank: typing.Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.cls = cls
        self.sizes = [_as_size(size, "sizes") for size in sizes]
        self.is_built_on_rank = is_built_on_rank
        self.config = copy.copy(config)
        self._plans = _plans_of_splits(self.config, self.sizes)

    def build(self) -> list:
        """Return [train, valid, test]: each is a dataset or None; valid may be a list of datasets.

        If the build fails on one rank, every rank raises an error.  If the ranks have different
        data, every rank raises ValueError.
        """
        if not _is_distributed():
            return self._build_splits()
        # _call_and_wait() and _call_on_rank_0_first() wait for all ranks, and raise an error on
        # every rank if a call fails on one (section 17).  Rank 0 calls _build_splits() first.  Then
        # each other rank calls it if is_needed_here, and otherwise only waits.
        is_needed_here = _call_and_wait(self.is_built_on_rank)
        datasets = _call_on_rank_0_first(self._build_splits, is_needed_here)
        _check_same_builds(datasets)  # section 13
        return datasets if is_needed_here else [None] * len(Split)

    def _build_splits(self):
        """Build the datasets of all splits on this rank."""
        opened = self._open_all()
        result = dict.fromkeys(Split)  # None for each split
        for plan in self._plans:
            corpora = [opened[prefix] for prefix in plan.prefixes]
            build = functools.partial(self._build_dataset, plan)
            datasets = self._map(build, corpora, plan.prefixes, plan.requested)
            size = self.sizes[plan.split.value]
            _warn_of_short_corpora(plan.split, size, datasets)  # no warning if size is 0
            if size != 0 and not any(len(dataset) for dataset in datasets):
                continue  # the split stays None
            if plan.is_blend:
                result[plan.split] = self._make_blend(plan, corpora, datasets)
            else:
                result[plan.split] = datasets if len(datasets) > 1 else datasets[0]
        return list(result.values())

    def _open_all(self):
        """Return {prefix: opened corpus}; a corpus that several splits use is opened once."""
        prefixes = {}  # a dict keeps the order and drops duplicates
        for plan in self._plans:
            prefixes |= dict.fromkeys(plan.prefixes)
        _allow_open_files()  # a blend of hundreds of corpora opens hundreds of files
        configs = [self.config] * len(prefixes)
        corpora = self._map(self.cls.build_low_level_dataset, list(prefixes), configs)
        opened = dict(zip(prefixes, corpora, strict=True))
        _check_corpora(opened, self.cls, self.config.tokenizer)
        return opened

    def _map(self, function, *columns):
        """Return [function(*row) for each row of zip(*columns)].

        Up to num_dataset_builder_threads calls run at the same time.
        """
        threads = self.config.num_dataset_builder_threads
        if threads == 1:
            return [function(*row) for row in zip(*columns, strict=True)]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            return list(pool.map(function, *columns))

    def _build_dataset(self, plan, corpus, prefix, num_samples):
        """Build the dataset of one corpus, from the documents that belong to the split."""
        first, end = split_range(plan.bounds, self.cls.numel_low_level_dataset(corpus))
        documents = range(first, end)
        if self.cls is not GPTDataset:  # a class written for upstream expects an array
            documents = np.arange(first, end, dtype=np.int32)
        return self.cls(corpus, prefix, documents, num_samples, plan.split, self.config)

    def _make_blend(self, plan, corpora, datasets):
        """Return the blend of the datasets of the corpora."""
        rows = list(zip(datasets, corpora, plan.prefixes, strict=True))
        weights = plan.weights
        size = plan.size
        if weights is None and plan.phases is None:
            rows = [row for row in rows if len(row[0])]
            if not rows:  # only if size is 0
                return None
            weights = [len(dataset) for dataset, _, _ in rows]
            _warn_of_few_samples(plan.split, sum(weights), size)
            if size is not None:
                size = min(size, sum(weights))
        arguments = (weights, size, self.config)
        try:
            datasets = [dataset for dataset, _, _ in rows]
            return BlendedDataset(datasets, *arguments, phases=plan.phases)
        except _BlendTooLarge as error:
            needed = error.needed  # {dataset that is too short: samples that the blend takes}
        # Rebuild only these corpora, because the order of a corpus may change if it is built with
        # more samples.
        large_enough = []
        for dataset, corpus, prefix in rows:
            if dataset in needed:
                dataset = self._build_dataset(plan, corpus, prefix, needed[dataset])
            large_enough.append(dataset)
        return BlendedDataset(large_enough, *arguments, phases=plan.phases)


# ==============================================================================
# 8. Samplers
# ==============================================================================
# Question: which samples does a rank read, and how does a run resume?
#
# Each rank that reads samples has a sampler.  The sampler yields one list of sample indices for
# each micro-batch of its dp rank; batches_of() reads these samples and stacks them.
#
#   round   micro_batch_size * data_parallel_size samples
#   step    M rounds; M is the global batch size divided by the samples in a round.  If M is
#           constant, step t reads rounds t*M .. t*M + M - 1.  Samplers know nothing about steps
#
# The loader of section 10 and this text call the three samplers "single"
# (MegatronPretrainingSampler), "cyclic" (MegatronPretrainingRandomSampler) and "full_validation"
# (MegatronFullValidationSampler).
#
# The sampler "single" keeps the samples in order and deals each dp rank a block of every round.
# The sampler "cyclic" shuffles them anew in each pass.  With data_sharding, the loader's default,
# each dp rank owns a part of the samples and shuffles only this part; all parts are shuffled with
# the same permutation.  Without it, all samples are shuffled together and dealt to the dp ranks one
# by one.  With micro_batch_size 2, data_parallel_size 2 and 8 samples:
#
#   round                            0              1
#   single               sample      0  1  2  3     4  5  6  7
#                        dp rank     0  0  1  1     0  0  1  1
#
#   cyclic, sharded      sample      0  1  4  5     3  2  7  6     dp rank 0 owns samples 0 .. 3
#                        dp rank     0  0  1  1     0  0  1  1
#
#   cyclic, unsharded    sample      4  0  7  3     2  5  1  6
#                        dp rank     0  1  0  1     0  1  0  1
#
# At the end of a pass, some samples may not fill a round.  What happens to them:
#
#   single                    dropped; they are always the last samples of the dataset
#   single, drop_last=False   read in a short last round, which the dp ranks share evenly.  Short
#                             micro-batches are completed with None, for a padding sample
#   full_validation           the same as single with drop_last=False and micro_batch_size 1
#   cyclic, sharded           dropped before the shuffle; they are the last ones of the dataset
#   cyclic, unsharded         dropped in two steps.  Before the shuffle: the last samples of the
#                             dataset, if they do not fill a micro-batch.  After it: the samples
#                             that do not fill a round, which are different ones in each pass
#
# For example, take 11 samples, rounds of 4 and micro-batches of 2.  "single" with drop_last never
# reads samples 8, 9 and 10, nor does sharded "cyclic".  Unsharded "cyclic" shuffles samples 0 .. 9,
# and then drops two.
#
# To resume, a sampler needs one number: consumed_samples, the samples that all dp ranks together
# have used.  Padding (None) does not count.  "single" counts from the start of the pass, "cyclic"
# from the start of the run.  A sampler that is created with this number yields the rest of the
# pass.  The loader of section 10 saves the number.  A resumed job may change some settings and
# still continue at the same sample:
#
#   sampler                   may change
#   single                    dp ranks, micro_batch_size
#   full_validation           dp ranks
#   cyclic, unsharded         dp ranks, micro_batch_size; its docstring has the conditions
#   cyclic, sharded           micro_batch_size; the same conditions


class _Sampler:
    """Base class of the samplers.

    kind                  name of the sampler in a saved state
    consumed_samples      as passed to the constructor; iterating does not change it
    next_start            where the next iteration starts, counted like consumed_samples; an
                          iteration changes it
    samples_per_round     micro_batch_size * data_parallel_size
    active_total_samples  number of samples in full rounds

    len() is the number of batches in a full pass, regardless of where the next iteration starts.

    Raises ValueError for an invalid size, and if the pass cannot start at consumed_samples.
    "cyclic" needs samples for at least one round, and starts only after full rounds.  The other
    samplers start at any sample, or at the end of the pass.

    Upstream differs: len() is the number of samples.
    """

    kind: str

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        self.total_samples = operator.index(total_samples)
        self.micro_batch_size = operator.index(micro_batch_size)
        self.data_parallel_rank = operator.index(data_parallel_rank)
        self.data_parallel_size = operator.index(data_parallel_size)
        self.drop_last = drop_last
        self.samples_per_round = self.micro_batch_size * self.data_parallel_size
        self.micro_batch_times_data_parallel_size = self.samples_per_round  # upstream's name
        self.consumed_samples = operator.index(consumed_samples)
        _check_start(self, self.consumed_samples)
        self.active_total_samples = self.total_samples - self.total_samples % self.samples_per_round
        self.next_start = self.consumed_samples

    def __len__(self) -> int:
        if self.drop_last:
            return self.active_total_samples // self.samples_per_round
        return _ceil_div(self.total_samples, self.samples_per_round)


class MegatronPretrainingSampler(_Sampler):
    """Sampler that yields the samples in order, from consumed_samples on.

    It yields lists of micro_batch_size sample indices (or None, see drop_last); dp rank r gets
    block r of each round.  All dp ranks yield the same number of lists.  Every later iteration
    starts at sample 0.

    drop_last  True: drop samples that do not fill a round.  False: pad this round with None

    >>> sampler = MegatronPretrainingSampler(total_samples=8, consumed_samples=0,
    ...     micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2)
    >>> list(sampler)
    [[2, 3], [6, 7]]
    """

    kind = "single"

    def __iter__(self) -> typing.Iterator[list[int | None]]:
        dp_rank = self.data_parallel_rank
        dp_size = self.data_parallel_size
        begin = self.next_start
        self.next_start = 0  # for the next iteration
        for first in range(begin, self.total_samples, self.samples_per_round):
            count = min(self.samples_per_round, self.total_samples - first)
            if self.drop_last and count < self.samples_per_round:
                return
            # In a full round, each dp rank gets micro_batch_size samples.  In a short round, the
            # numbers of samples of two dp ranks differ by at most 1, and dp rank 0 has the most:
            # of 5 samples, 4 dp ranks get 2, 1, 1 and 1.
            own_first = first + _ceil_div(dp_rank * count, dp_size)
            own_end = first + _ceil_div((dp_rank + 1) * count, dp_size)
            padding = [None] * (self.micro_batch_size - (own_end - own_first))
            yield [*range(own_first, own_end), *padding]

    def get_start_end_idx(self) -> tuple[int, int]:
        """Return (first, end), this dp rank's block in a full round.  (For upstream's users.)"""
        first = self.data_parallel_rank * self.micro_batch_size
        return first, first + self.micro_batch_size


class MegatronFullValidationSampler(MegatronPretrainingSampler):
    """Sampler "single" with micro_batch_size 1 and drop_last=False: it yields every sample.

    In the last round, dp ranks without a sample get None.  Later iterations start at sample 0.

    Upstream differs: it has no consumed_samples.

    >>> list(MegatronFullValidationSampler(3, data_parallel_rank=1, data_parallel_size=2))
    [[1], [None]]
    """

    kind = "full_validation"

    def __init__(
        self,
        total_samples: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        *,
        consumed_samples: int = 0,
    ) -> None:
        super().__init__(
            total_samples, consumed_samples, 1, data_parallel_rank, data_parallel_size, False
        )


class MegatronPretrainingRandomSampler(_Sampler):
    """Sampler that yields the samples in a new random order in each pass.

    dataset        ignored; upstream has this argument
    data_sharding  True: each dp rank owns a part of the samples and shuffles only this part.
                   False: the samples are shuffled together and dealt to the dp ranks one by one
    seed           0 to 2**63 - 1; pass p is shuffled with seed + p.  0 gives upstream's order

    A resumed run may have a different micro_batch_size or, without data_sharding, a different
    number of dp ranks.  It continues at the same sample if

      - samples_shuffled() is the same
      - divmod(consumed_samples, active_total_samples), the pass and the place in it, is the same
      - consumed_samples is a multiple of the new samples_per_round

    For example, with 100 samples, micro_batch_size 4 and no data_sharding, 100 samples are shuffled
    and 96 of them are read in a pass, on 2 dp ranks as on 4.  So a run on 2 dp ranks may continue
    on 4 after 16, 32, 48, ... consumed samples.

    All dp ranks yield the same number of lists.  An iteration ends with its pass; the next one
    continues after the last list that was yielded.

    Upstream differs: without data_sharding, ranks may yield different numbers of lists, and so
    drift into different passes.

    >>> for rank in (0, 1):
    ...     sampler = MegatronPretrainingRandomSampler(None, total_samples=8, consumed_samples=0,
    ...         micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=2,
    ...         data_sharding=False)
    ...     print(list(sampler))
    [[4, 7], [2, 1]]
    [[0, 3], [5, 6]]
    """

    kind = "cyclic"

    def __init__(
        self,
        dataset: typing.Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
        seed: int = 0,
    ) -> None:
        super().__init__(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        self.dataset = dataset
        self.data_sharding = bool(data_sharding)  # a state is JSON, which has no np.bool_
        self.seed = _as_whole(seed, "seed", 0, 2**63 - 1)

    def __iter__(self) -> typing.Iterator[list[int]]:
        pass_number, done = divmod(self.next_start, self.active_total_samples)
        order = self._order_of_rank(pass_number)
        done_by_rank = done // self.data_parallel_size
        for first in range(done_by_rank, len(order), self.micro_batch_size):
            self.next_start += self.samples_per_round
            yield order[first : first + self.micro_batch_size].tolist()

    def _order_of_rank(self, pass_number):
        """Return the samples that this dp rank reads in a pass, in order."""
        dp_rank = self.data_parallel_rank
        dp_size = self.data_parallel_size
        # on the CPU, even if torch's default device is a GPU
        generator = torch.Generator("cpu").manual_seed(self.seed + pass_number)
        if self.data_sharding:
            count = self.samples_shuffled() // dp_size  # samples of a dp rank
            return dp_rank * count + torch.randperm(count, generator=generator, device="cpu")
        order = torch.randperm(self.samples_shuffled(), generator=generator, device="cpu")
        return order[dp_rank : self.active_total_samples : dp_size]

    def samples_shuffled(self) -> int:
        """Return how many samples of the dataset are shuffled in a pass."""
        if self.data_sharding:
            return self.active_total_samples
        return self.total_samples - self.total_samples % self.micro_batch_size


def batches_of(dataset: typing.Any, sampler: _Sampler) -> typing.Iterator[dict]:
    """Yield the micro-batches of a dp rank: the samples of each list of the sampler, stacked.

    This function defines what PretrainingDataLoader (section 10) yields.  The loader can also
    prepare batches in advance and save its position.

    >>> config = GPTDatasetConfig(1234, 4, blend=([toy_corpus()], None), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, [3, 0, 0], lambda: True, config)
    >>> train, _, _ = builder.build()
    >>> sampler = MegatronPretrainingSampler(len(train), consumed_samples=0, micro_batch_size=2,
    ...                                      data_parallel_rank=0, data_parallel_size=1)
    >>> for batch in batches_of(train, sampler):
    ...     print({key: tuple(tensor.shape) for key, tensor in batch.items()})
    {'tokens': (2, 4), 'labels': (2, 4), 'loss_mask': (2, 4), 'position_ids': (2, 4)}

    Two of the three samples make a batch.  The third does not fill a round, so it is dropped.

    >>> batch["tokens"]                                              # b b b c, and c c c c
    tensor([[98, 98, 98, 99],
            [99, 99, 99, 99]])
    """
    for indices in sampler:
        yield torch.utils.data.default_collate([dataset[idx] for idx in indices])


# ==============================================================================
# 9. Parallel batches
# ==============================================================================
# Question: which part of each batch does a rank get, and from where?
#
# A big model is trained by many ranks, which divide the work along up to four axes.  A rank has a
# coordinate on each axis.  (The coordinate on dp is its dp rank.)  Ranks with different coordinates
# on an axis have:
#
#   tp  tensor parallel     different parts of every layer, and the same batch
#   cp  context parallel    different parts of every row of the batch
#   dp  data parallel       copies of the same part of the model, and different batches
#   pp  pipeline parallel   different layers.  Ranks with the same pp coordinate are called a stage:
#                           the first stage needs the tokens, the last stage the labels
#
# Ranks that work together form a process group of torch.distributed.  A group sends tensors with
# one of two backends: gloo between CPUs, or NCCL between GPUs.
#
# All ranks with the same dp coordinate use the same batches.  In the first and in the last stage,
# the ranks with tp 0 read them, each with its own loader, and send them to the other tp ranks.
#
# An intermediate stage usually reads nothing: it gets its input from the stage before it.  As in
# upstream, its ranks with tp 0 read batches in two cases:
#
#   packed   Attention keeps the documents of a row apart (inter_document_masking of section 5, or
#            the conversations of section 21).  Then every stage needs cu_seqlens and max_seqlen.
#   mtp      The stage predicts several tokens ahead (multi-token prediction).  Then it needs
#            tokens, positions, labels and loss mask.
#
# Ranks are numbered along tp first, then cp, dp and pp: with 2 ranks on each axis, the number of a
# rank is tp + 2 cp + 4 dp + 8 pp.  A round reaches the ranks in four steps, from top to bottom.
# Each row says what is divided or sent, how, and for whom:
#
#   a round (section 8)  --sampler-->    dp 0: ranks 0-3, 8-11          dp 1: ranks 4-7, 12-15
#   batch of a dp rank   --keep----->    pp 0: tokens, positions        pp 1: labels, loss mask
#   batch of a stage     --one buffer->  tp 0: reads and sends it       tp 1: receives it
#   batch of a tp rank   --cut------>    cp 0: chunks 0 and 3 of 4      cp 1: chunks 1 and 2
#
# For the last step, each row is cut into 2 * cp_size equal chunks, and each cp rank gets two of
# them.  (In packed rows, each document is cut, unless use_per_sequence_balancing is set.)  Why
# chunks 0 and 3?  Under a causal mask, the last token attends to all tokens, and the first token
# only to itself.  So the first chunk costs least and the last chunk costs most.  Together they cost
# as much as any other such pair.

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


class ParallelGroups:
    """The ranks of a job, arranged in groups along the axes tp, cp, dp and pp.

    tensor, context, pipeline   number of ranks along the axes tp, cp and pp.  The number along dp
                                is the number of all ranks, divided by the product of these three

    Most methods have an argument kind: an axis, such as "tp", or several axes joined by "-", such
    as "dp-cp".  The ranks of a group differ only in their coordinates on these axes.

    Every rank must create its ParallelGroups at the same point in the program, after
    torch.distributed is initialized.  A job of one process does not need torch.distributed.

    Raises ValueError if a size is below 1, if the number of ranks is not a multiple of
    tensor * context * pipeline, or if the environment variable WORLD_SIZE is above 1, but
    torch.distributed is not initialized.

    Upstream: parallel_state and its RankGenerator, with the order tp-cp-ep-dp-pp, where the size of
    ep, for experts, is 1.

    >>> ParallelGroups.rank_lists("cp", tensor=2, context=2)
    [[0, 2], [1, 3]]
    >>> ParallelGroups.rank_lists("tp-pp", tensor=2, data=2, pipeline=2)
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """

    # the kinds for which group() returns a process group; the other methods accept every kind
    _KINDS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp-pp")

    @staticmethod
    def rank_lists(
        kind: str, *, tensor: int = 1, context: int = 1, data: int = 1, pipeline: int = 1
    ) -> list[list[int]]:
        """Return the groups along the axes of kind, each as a list of ranks.

        The job has tensor * context * data * pipeline ranks, and each of them is in one list.
        Raises ValueError for an unknown axis.
        """
        axes = kind.split("-")
        _check_axes(kind, axes)
        tensor, context, data, pipeline = map(operator.index, (tensor, context, data, pipeline))
        groups = {}
        for rank in range(tensor * context * data * pipeline):
            rest, tp = divmod(rank, tensor)
            rest, cp = divmod(rest, context)
            pp, dp = divmod(rest, data)
            coordinates = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
            shared = tuple(coordinates[axis] for axis in coordinates if axis not in axes)
            groups.setdefault(shared, []).append(rank)
        return list(groups.values())

    def __init__(self, *, tensor: int = 1, context: int = 1, pipeline: int = 1) -> None:
        tensor, context, pipeline = map(operator.index, (tensor, context, pipeline))
        world_size = _num_processes()
        _check_parallel_sizes(world_size, tensor, context, pipeline)
        data = world_size // (tensor * context * pipeline)
        self.sizes = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline}
        self._ranks = {}  # {kind: the ranks of this rank's group}
        self._groups = dict.fromkeys(self._KINDS)  # {kind: this rank's process group}
        self.batch_group = None  # the tensor-parallel group that sends batches
        if _is_distributed():
            for kind in self._KINDS:
                self._groups[kind] = self._new_group(kind)
            # for batches, always gloo: _share_batch() says why
            self.batch_group = self._new_group("tp", backend="gloo")

    def _new_group(self, kind, backend=None):
        """Create all process groups of a kind, on every rank, and return this rank's group."""
        lists = self.rank_lists(kind, **self.sizes)
        mine, _ = torch.distributed.new_subgroups_by_enumeration(lists, backend=backend)
        return mine

    def ranks(self, kind: str) -> list[int]:
        """Return the ranks in this rank's group, for example along the axes "dp-cp"."""
        if kind not in self._ranks:
            lists = self.rank_lists(kind, **self.sizes)
            self._ranks[kind] = next(ranks for ranks in lists if _rank() in ranks)
        return self._ranks[kind]

    def rank(self, kind: str) -> int:
        """Return this rank's position in its group; on a single axis, this is its coordinate."""
        return self.ranks(kind).index(_rank())

    def size(self, kind: str) -> int:
        """Return the number of ranks in this rank's group."""
        return len(self.ranks(kind))

    def group(self, kind: str) -> "torch.distributed.ProcessGroup | None":
        """Return this rank's process group, or None without torch.distributed.

        Raises KeyError unless kind is "tp", "cp", "dp", "pp", "dp-cp", "tp-pp" or "tp-cp-pp".
        """
        return self._groups[kind]

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank is in the first pipeline stage, which has the embedding."""
        return self.rank("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank is in the last pipeline stage, which computes the loss."""
        return self.rank("pp") == self.size("pp") - 1


def get_batch(
    data_iterator: typing.Iterator[dict] | None,
    groups: ParallelGroups,
    *,
    use_per_sequence_balancing: bool = False,
    **options: typing.Any,
) -> dict[str, typing.Any]:
    """Read the next micro-batch, share it among the tp ranks, and return this cp rank's part.

    options                     keyword arguments of get_batch_on_this_tp_rank()
    use_per_sequence_balancing  True: cut full rows, even if the batch has cu_seqlens, as in
                                get_batch_on_this_cp_rank().  (In upstream's name, "sequence" means
                                a row.)

    Raises the errors of these two functions.

    >>> row = torch.tensor([list(b"aaaab")])
    >>> batch = {"tokens": row[:, :-1], "labels": row[:, 1:], "loss_mask": torch.ones(1, 4)}
    >>> batch["position_ids"] = torch.arange(4)[None]
    >>> mine = get_batch(iter([batch]), ParallelGroups(), micro_batch_size=1, sequence_length=4)
    >>> bytes(mine["labels"][0].tolist()), mine["attention_mask"]
    (b'aaab', None)
    """
    batch = get_batch_on_this_tp_rank(data_iterator, groups, **options)
    rank = groups.rank("cp")
    size = groups.size("cp")
    return get_batch_on_this_cp_rank(
        batch, rank, size, use_per_sequence_balancing=use_per_sequence_balancing
    )


def get_batch_on_this_tp_rank(
    data_iterator: typing.Iterator[dict] | None,
    groups: ParallelGroups,
    *,
    micro_batch_size: int,
    sequence_length: int,
    create_attention_mask: bool = False,
    mtp: bool = False,
    packed: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, torch.Tensor | None]:
    """Read the next micro-batch on tp rank 0, and return it on every tensor-parallel rank.

    data_iterator          iterator over the batches of a loader.  It may be None on a rank that
                           reads no batches (see the opening of this section)
    micro_batch_size       B, the number of rows in a batch
    sequence_length        S, the number of tokens in a row
    create_attention_mask  True: the first and the last stage get the dense mask, too.  False: a
                           mask in the batch is left out.  Pass config.has_dense_mask.  (The default
                           here differs from the config's, because a mask has S * S bytes a row)
    mtp                    True: this stage predicts several tokens ahead (multi-token prediction).
                           It gets tokens, position_ids, labels and loss_mask, whichever stage it is
    packed                 True: the batches have cu_seqlens and max_seqlen.  Every stage gets them
    device                 the device of the returned tensors.  None: this rank's GPU in a job with
                           NCCL, otherwise the CPU

    Return a dict with five keys, or seven if packed.  The value of a key that this stage does not
    need is None.

      tokens, labels, position_ids   int64 (B, S)
      loss_mask                      float32 (B, S)
      attention_mask                 bool (B, 1, S, S), True: may not attend
      cu_seqlens                     int32 (B, S+1), only if packed
      max_seqlen                     int32 (B,), only if packed

    If the read fails, every rank of the tp group raises an error: StopIteration at the end of the
    data, ValueError for a batch that does not match the arguments (section 13).

    Upstream differs: it broadcasts each tensor separately.
    """
    batch = dict.fromkeys(_BATCH_KEYS)
    shape = (operator.index(micro_batch_size), operator.index(sequence_length))
    layout = _layout_of_stage(groups, shape, create_attention_mask, mtp, packed)
    if not layout:
        return batch
    if device is None:
        device = _device_of_group()  # section 17
    device = torch.device(device)
    read = functools.partial(_read_batch, data_iterator, layout, create_attention_mask)
    if groups.size("tp") == 1:
        for key, tensor in read().items():
            batch[key] = tensor.to(device, non_blocking=True)
    else:
        batch.update(_share_batch(read, layout, groups, device))
    return batch


def _layout_of_stage(groups, shape, create_attention_mask, mtp, packed):
    """Return {key: (shape, dtype)} of what this rank's stage needs, the widest items first."""
    first = groups.is_first_stage
    last = groups.is_last_stage
    B, S = shape
    layout = {}
    if first or mtp:
        layout["tokens"] = (shape, torch.int64)
        layout["position_ids"] = (shape, torch.int64)
    if last or mtp:
        layout["labels"] = (shape, torch.int64)
        layout["loss_mask"] = (shape, torch.float32)
    if packed:
        layout["cu_seqlens"] = ((B, S + 1), torch.int32)
        layout["max_seqlen"] = ((B,), torch.int32)
    if (first or last) and create_attention_mask:
        layout["attention_mask"] = ((B, 1, S, S), torch.bool)
    return layout


def _read_batch(data_iterator, layout, create_attention_mask):
    """Read the next batch and return {key: tensor} for the layout, on the CPU and in its dtypes."""
    batch = next(data_iterator)
    _check_batch(batch, layout, create_attention_mask)
    return {key: batch[key].to("cpu", dtype) for key, (_, dtype) in layout.items()}


def _share_batch(read, layout, groups, device):
    """Call read() on tp rank 0, send the batch to its tp group, and return it on every rank.

    The batch is sent in one buffer.  This is the buffer of a first stage, for 2 rows of 4 tokens:

      byte   0        8                         72                        136
             | flag   | tokens, 2 x 4 int64     | position_ids, 2 x 4     |

    The tensors with the widest items come first.  So each tensor begins at a multiple of its item
    size, and is a view of the buffer.  The receivers know this layout in advance: it follows from
    their stage and from the arguments of get_batch().  The flag is 1 if the read failed, otherwise
    0.  If it is 1, a second broadcast carries the error message, and every rank of the group raises
    the error.
    """
    sent = {"error_flag": ((), torch.int64)} | layout
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in sent.values())
    # The CPU need not wait for a copy from pinned memory to the GPU.
    buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    views = _views_of_buffer(buffer, sent)
    error = None
    if groups.rank("tp") == 0:
        # _try_call() returns (result, None) or (None, error); it does not catch KeyboardInterrupt
        # and SystemExit (section 17).
        _, error = _try_call(_read_into, views, read)
        views["error_flag"].fill_(error is not None)
    # This group uses gloo.  With NCCL, the flag would arrive on the GPU, and a receiver that reads
    # it would wait for all work that is queued there.
    torch.distributed.broadcast(buffer, group=groups.batch_group, group_src=0)
    if views["error_flag"]:
        _raise_on_every_rank(0, error, groups.batch_group)  # in a second broadcast (section 17)
    batch = _views_of_buffer(buffer.to(device, non_blocking=True), sent)
    del batch["error_flag"]
    return batch


def _read_into(views, read):
    """Read a batch and copy its tensors into views of a buffer."""
    for key, tensor in read().items():
        views[key].copy_(tensor)


def _views_of_buffer(buffer, layout):
    """Return {key: tensor}: views of a buffer that holds the tensors of a layout end to end."""
    views = {}
    start = 0
    for key, (shape, dtype) in layout.items():
        size = math.prod(shape) * dtype.itemsize
        views[key] = buffer[start : start + size].view(dtype).view(shape)
        start += size
    return views


def get_batch_on_this_cp_rank(
    batch: dict[str, typing.Any],
    cp_rank: int,
    cp_size: int,
    *,
    use_per_sequence_balancing: bool = False,
) -> dict[str, typing.Any]:
    """Return this context-parallel rank's part of a batch: two of 2 * cp_size chunks of each row.

    Rank r gets chunks r and 2 * cp_size - 1 - r, in this order.

    batch      a dict.  With cu_seqlens, each document is cut separately

                 attention_mask                         cut along dim 2, the queries; all keys stay
                 other tensors with S tokens in dim 1   cut along dim 1
                 all other values, and cu_seqlens       passed on as they are.  Attention needs
                                                        the cu_seqlens of the full row

    use_per_sequence_balancing
               True: cut the full row, even with cu_seqlens.  False: with cu_seqlens, cut each
               document.  (In this name, which is upstream's, "sequence" means a row.)

    Return a new dict, whose rows have S / cp_size tokens.  The batch is not changed.

    Raises ValueError if cp_rank is not in 0 .. cp_size - 1.  With cp_size > 1, also raises it
    unless the length of the row, or of each document that is cut, is a multiple of 2 * cp_size.
    SFTDataset pads its documents to such a length if context_parallel_size is set.  GPTDataset does
    not, so with inter_document_masking, set use_per_sequence_balancing.  The shapes and the keys of
    the batch are checked, too (section 13).

    Upstream differs: it modifies the batch in place.

    >>> batch = {"tokens": torch.arange(8)[None]}
    >>> [get_batch_on_this_cp_rank(batch, rank, 2)["tokens"].tolist() for rank in (0, 1)]
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    >>> batch["cu_seqlens"] = torch.tensor([[0, 4, 8, 8, 8, 8, 8, 8, 8]])       # two documents
    >>> [get_batch_on_this_cp_rank(batch, rank, 2)["tokens"].tolist() for rank in (0, 1)]
    [[[0, 3, 4, 7]], [[1, 2, 5, 6]]]
    """
    cp_size = _as_whole(cp_size, "cp_size", 1)
    cp_rank = _as_whole(cp_rank, "cp_rank", 0, cp_size - 1)
    part = dict(batch)
    if cp_size == 1:
        return part
    _check_batch_to_cut(batch)
    S = _length_of_rows(batch)
    if S is None:
        return part
    cuts_full_rows = use_per_sequence_balancing or batch.get("cu_seqlens") is None
    if cuts_full_rows:
        _check_divisible_row(S, cp_size)
        chunk_size = S // (2 * cp_size)
    else:
        # the positions in each row that this rank keeps
        positions = _positions_in_documents(batch["cu_seqlens"], S, cp_rank, cp_size)
    for key, value in batch.items():
        if key == "cu_seqlens" or not isinstance(value, torch.Tensor):
            continue
        dim = 2 if key == "attention_mask" else 1
        _check_axis_to_cut(key, value, dim, S)  # raises if tokens, labels, ... have another length
        if value.dim() <= dim or value.shape[dim] != S:  # it has no axis of S tokens
            continue
        if cuts_full_rows:
            front = value.narrow(dim, cp_rank * chunk_size, chunk_size)
            back = value.narrow(dim, S - (cp_rank + 1) * chunk_size, chunk_size)
            part[key] = torch.cat([front, back], dim)
        else:
            _check_rows_to_cut(key, value, positions)
            rows = zip(value, positions.to(value.device), strict=True)
            part[key] = torch.stack([row.index_select(dim - 1, kept) for row, kept in rows])
    return part


def _length_of_rows(batch):
    """Return S, the number of tokens in a row, or None if the batch has no rows."""
    for key in _BATCH_KEYS:
        if batch.get(key) is not None:
            return batch[key].shape[-1]
    if batch.get("cu_seqlens") is not None:  # all that an intermediate stage has of a packed batch
        return batch["cu_seqlens"].shape[-1] - 1
    return None


def _positions_in_documents(cu_seqlens, S, cp_rank, cp_size):
    """Return the positions in each row that a cp rank keeps, if it cuts each document separately.

    The result is int64 (rows, S / cp_size).  With cp_size 2 and documents of 4 and 8 tokens:

      position   0 1 2 3   4 5 6 7 8 9 10 11
      document   a a a a   b b b b b b b  b
      chunk      0 1 2 3   0 0 1 1 2 2 3  3     of the 2 * cp_size chunks of the document
      cp rank    0 1 1 0   0 0 1 1 1 1 0  0
    """
    bounds = _as_bounds(cu_seqlens, S)  # begins with 0 and ends with S
    _check_divisible_documents(bounds, cp_size)
    positions = torch.arange(S, device="cpu").repeat(len(bounds), 1)
    next_bound = torch.searchsorted(bounds, positions, right=True)  # its index in bounds
    start = bounds.gather(1, next_bound - 1)  # where the document of each position starts
    end = bounds.gather(1, next_bound)
    chunk = (positions - start) * (2 * cp_size) // (end - start)
    is_kept = (chunk == cp_rank) | (chunk == 2 * cp_size - 1 - cp_rank)
    return positions[is_kept].view(len(bounds), -1)


# ==============================================================================
# PART II: THE TRAINING LOOP
# ==============================================================================
#
# ==============================================================================
# 10. The loader and its state
# ==============================================================================
# Question: how are batches prepared in advance, and what is in a checkpoint?
#
#   sampler         0 1 2 3 4 ...    yields the sample indices of batch 0, batch 1, ...
#   threads             2 3          prepare the next batches
#   training loop     1              uses a prepared batch
#
# If C is available (section 18), num_workers threads prepare the batches of a GPTDataset or of a
# blend of GPTDatasets.  C fills a batch with the GIL released, so the training loop keeps running.
# Without C, or for any other dataset, torch's DataLoader starts num_workers processes.
#
# The sampler runs ahead of the training loop, so the saved position counts only the batches that
# the loop has received.  A resumed job prepares the unused batches again.
#
# A state holds the position, whether the pass has ended, and a history.  The history is a JSON
# text.  It records everything that determined the samples so far.  Saving a state reads no sample.
# After 24 samples of a blend, the history is:
#
#   {"sampler": {"kind of the sampler": "single"},    "cyclic" adds its seed and more
#    "data": {"class": "BlendedDataset",
#             "corpus 0": {"class": "GPTDataset",
#                          "name (not compared)": "wiki",
#                          "fingerprint": {...},      see IndexedDataset.fingerprint()
#                          "random_seed": 1234, ...}, and more: see _settings_of()
#             "which corpus gave which sample (weights, blend_phases)": 1403640103}}
#                                                     the CRC-32 of dataset_index[:24]
#
# A job that loads this state computes the history of its own data and sampler for 24 samples, and
# resumes if the two histories are equal.  (Section 8 says when its number of ranks or its
# micro_batch_size may differ.)  The comparison ignores what cannot change the tokens of these 24
# samples, or their order:
#
#   - paths of files
#   - settings of masks and positions
#   - corpora that have given no sample yet
#   - with stable_order, the length of the run and all later phases
#
# Two changes are not noticed: an edit in the middle of a pair that keeps all lengths, and new code
# in a class that the user has defined.

_STATE_VERSION = 8  # increment if the same history could now describe different samples
_LABEL_KEY = "name (not compared)"  # for messages; a copy of a pair may have a different name
_EPOCH_KEYS = ("stable_order, or one epoch", "epochs", "last epoch shuffled alone")


class PretrainingDataLoader(torch.utils.data.DataLoader):
    """A DataLoader whose position can be saved, like torchdata's StatefulDataLoader.

    dataset        any dataset.  If the sampler pads batches with None, dataset[None] must be a
                   padding sample.  (A Subset passes None on to its dataset)
    batch_sampler  a sampler of section 8
    num_workers    how many threads or processes prepare batches in advance.  0: none
    kwargs         further arguments of DataLoader, such as collate_fn.  If any of them other than
                   pin_memory is given, DataLoader makes the batches, even for a GPTDataset

    len() is the number of batches in a full pass, also after a resume.

    The first iterator starts at the sampler's consumed_samples.  After load_state_dict(), the next
    iterator starts at the saved position.  Later ones start at sample 0.  If the resumed iterator
    was not exhausted, a warning says so.  (With a cyclic sampler, later iterators start after the
    last batch that the loop received.)

    If several iterators are in use, the state describes the newest.  With persistent_workers, the
    older iterators raise RuntimeError.

    If no generator is given, the random numbers in worker processes depend only on
    torch.initial_seed(), the data-parallel rank, and the sample at which the iterator starts.

    >>> loader = PretrainingDataLoader(range(6), MegatronPretrainingSampler(6, 0, 2, 0, 1))
    >>> state = [loader.state_dict() for batch in loader][0]          # after the first batch
    >>> again = PretrainingDataLoader(range(6), MegatronPretrainingSampler(6, 0, 2, 0, 1))
    >>> again.load_state_dict(state)
    >>> list(again)
    [tensor([2, 3]), tensor([4, 5])]
    """

    def __init__(
        self, dataset: typing.Any, batch_sampler: _Sampler, num_workers: int = 0, **kwargs: object
    ) -> None:
        num_workers = _as_whole(num_workers, "num_workers")
        _check_loader(batch_sampler, kwargs)
        if type(dataset) is torch.utils.data.Subset:
            dataset = _PaddedSubset(dataset.dataset, dataset.indices)
        may_use_threads = IMPLEMENTATION == "c" and _can_use_c(dataset)
        self.makes_own_batches = may_use_threads and kwargs.keys() <= {"pin_memory"}
        self.num_threads = num_workers if self.makes_own_batches else 0
        num_workers -= self.num_threads  # with threads, torch starts no processes
        super().__init__(dataset, batch_sampler=batch_sampler, num_workers=num_workers, **kwargs)
        self._has_generator = self.generator is not None  # the caller gave one
        self.consumed_samples = batch_sampler.consumed_samples
        self.is_end_of_pass = 0  # see state_dict()
        self._current_iterator = None  # an object that identifies the newest iterator
        self._is_loaded = False  # True: no iterator has begun since load_state_dict()
        self._resumed_end = 0  # the sample at which the resumed pass ends, or 0 if none was resumed
        self._memo = {}  # cached results
        # Fetch the fingerprints now, so that state_dict() need not access storage.
        _provenance_of(dataset, None, self._memo)

    def __iter__(self) -> typing.Iterator[dict]:
        sampler = self.batch_sampler
        if sampler.kind == "cyclic":
            # This sampler advances next_start as it runs ahead of the loop.  (The other samplers
            # set next_start to 0 when they begin.)
            sampler.next_start = self.consumed_samples
        begin = sampler.next_start
        end = self._end_of_pass(begin)
        if begin != self.consumed_samples < self._resumed_end:
            _warn(
                f"the resumed iterator stopped at sample {self.consumed_samples}, and the new one "
                f"starts at sample {begin}; to read the rest, call load_state_dict() again"
            )
        self._resumed_end = end if self._is_loaded and not self.is_end_of_pass else 0
        self._is_loaded = False
        self._current_iterator = this_iterator = object()
        batches = self._iter_own_batches() if self.makes_own_batches else self._iter_torch_batches()
        consumed = begin
        for batch in batches:
            consumed = min(consumed + sampler.samples_per_round, end)
            if self._current_iterator is this_iterator:
                self.consumed_samples = consumed
                self.is_end_of_pass = 0
            yield batch
            _check_iterator(self, this_iterator)
        if consumed < end:
            raise RuntimeError(
                f"the batches ended at sample {consumed}, but the pass ends at sample {end}; check "
                "that neither the dataset nor collate_fn raises StopIteration"
            )
        if self._current_iterator is this_iterator:
            self.is_end_of_pass = int(self._end_of_pass(consumed) == consumed)

    def _end_of_pass(self, begin):
        """Return the sample at which the pass ends, if it starts or continues at sample begin."""
        sampler = self.batch_sampler
        end = sampler.total_samples
        if sampler.kind == "cyclic":  # the next pass begins at the sample where this pass ends
            pass_number = begin // sampler.active_total_samples
            end = (pass_number + 1) * sampler.active_total_samples
        if sampler.drop_last:
            end -= (end - begin) % sampler.samples_per_round
        return end

    def _iter_own_batches(self):
        """Yield the batches of the pass.  Threads, if there are any, prepare batches in advance.

        An error in a batch is raised when the loop requests this batch.
        """
        if not self.num_threads:
            yield from map(self._make_batch, self.batch_sampler)
            return
        pool = concurrent.futures.ThreadPoolExecutor(self.num_threads)
        pending = collections.deque()
        try:
            for indices in self.batch_sampler:
                pending.append(pool.submit(self._make_batch, indices))
                if len(pending) > self.num_threads + 1:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # the loop may leave the iterator early, and need not wait for running threads
            pool.shutdown(wait=False, cancel_futures=True)

    def _iter_torch_batches(self):
        """Yield the batches of the pass, as torch's DataLoader makes them."""
        if not self._has_generator:
            # DataLoader would draw the seed of its processes from torch's global generator.  Only
            # ranks with a loader would do so, and their dropout would then differ.
            sampler = self.batch_sampler
            entropy = [torch.initial_seed(), sampler.data_parallel_rank, sampler.next_start]
            [seed] = np.random.SeedSequence(entropy).generate_state(1, np.uint64).tolist()
            self.generator = torch.Generator().manual_seed(seed)
        with torch.device("cpu"):  # DataLoader fails with a different default device
            batches = super().__iter__()
        end = object()
        while True:
            with torch.device("cpu"):  # not around the yield, where the caller's code runs
                batch = next(batches, end)
            if batch is end:
                return
            yield batch

    def _make_batch(self, indices):
        """Return a batch.

        With pin_memory and a GPU, it is in pinned memory, from which copies to the GPU are faster.
        """
        batch = _make_batch(self.dataset, indices)
        if self.pin_memory and torch.cuda.is_available():
            batch = {key: values.pin_memory() for key, values in batch.items()}
        return batch

    # ---- the state

    def state_dict(self) -> dict:
        """Return the state: a dict of three integers and a string.

        version            the format of the state
        consumed_samples   how many samples all ranks together have used
        is_end_of_pass     1 if the newest iterator has read its pass to the end, otherwise 0.  With
                           a cyclic sampler always 0, because consumed_samples counts all passes
        history            what determined the consumed samples, as JSON; "{}" if there are none

        The state is the same on all ranks that read data.  Save the state of one of these ranks:
        on a rank that receives its batches from a different rank, the loader stays at sample 0.
        """
        return {
            "version": _STATE_VERSION,
            "consumed_samples": self.consumed_samples,
            "is_end_of_pass": self.is_end_of_pass,
            "history": self._history_json(self.consumed_samples),
        }

    def load_state_dict(self, state_dict: dict, strict: bool = True) -> None:
        """Make the next iterator resume at the saved position.

        If the saved pass had ended, the next iterator starts the next pass.  However, if the
        dataset is longer or a round is smaller now, the old pass may have a batch left, and the
        iterator then reads the rest of this pass.  An iterator that has already begun raises
        RuntimeError at its next batch.

        strict   True: raise ValueError if version or history differs from what this loader would
                 save.  The error names the first value that differs.  False: skip the comparison

        Raises ValueError if state_dict is not a state, or if the sampler cannot start at the saved
        position.
        """
        failure = "this is not what a loader's state_dict() returned"
        if strict:
            with _naming_failure("cannot resume", failure):
                version = {"version (the format of the state)": state_dict["version"]}
            _check_same_history(version, dict.fromkeys(version, _STATE_VERSION))
        with _naming_failure("cannot resume", failure):
            consumed = operator.index(state_dict["consumed_samples"])
            # older states, which strict=False accepts, lack is_end_of_pass
            had_ended = operator.index(state_dict.get("is_end_of_pass", 0)) > 0
            history = _parse_history(state_dict["history"]) if strict else {}
        _check_start(self.batch_sampler, consumed)
        if strict:
            _check_same_history(history, _parse_history(self._history_json(consumed)))
        self._is_loaded = True
        self._resumed_end = 0
        self.consumed_samples = consumed
        self.is_end_of_pass = int(had_ended and self._end_of_pass(consumed) == consumed)
        self.batch_sampler.next_start = 0 if self.is_end_of_pass else consumed

    def _history_json(self, consumed_samples):
        """Return what determined the consumed samples, as JSON, or "{}" if there are none."""
        if consumed_samples == 0:
            return "{}"
        sampler = self.batch_sampler
        settings = {"kind of the sampler": sampler.kind}
        n = consumed_samples  # without "cyclic", these are samples 0 .. n - 1
        if sampler.kind == "cyclic":
            n = sampler.samples_shuffled()  # each of these may have been consumed
            settings["seed of the sampler"] = sampler.seed
            settings["data_sharding"] = sampler.data_sharding
            settings["samples that are shuffled"] = n
            settings["pass"] = consumed_samples // sampler.active_total_samples
            settings["samples done in the pass"] = consumed_samples % sampler.active_total_samples
            if sampler.data_sharding:
                settings["data_parallel_size"] = sampler.data_parallel_size
        history = {"sampler": settings, "data": _provenance_of(self.dataset, n, self._memo)}
        return json.dumps(history, default=_json_default)


def build_pretraining_data_loader(
    dataset: typing.Any,
    consumed_samples: int,
    *,
    micro_batch_size: int,
    data_parallel_rank: int | None = None,
    data_parallel_size: int | None = None,
    dataloader_type: str = "single",
    data_sharding: bool = True,
    num_workers: int = 0,
    full_validation: bool = False,
    drop_last: bool = True,
    seed: int = 0,
) -> typing.Any:
    """Return a PretrainingDataLoader of this rank's micro-batches, or None if there are no samples.

    dataset              any dataset, or None.  Lists of datasets are rejected
    consumed_samples     where to start: how many samples all ranks together have used (section 8)
    data_parallel_rank   number of this data-parallel rank.  None: 0
    data_parallel_size   number of data-parallel ranks.  None: 1
    dataloader_type      "single" or "cyclic": the sampler (section 8).  "external": dataset is
                         already a loader, and is returned as it is
    full_validation      True: read each sample once, one sample per rank and round, whatever
                         dataloader_type and micro_batch_size are
    drop_last            for "single".  True: drop the last samples, if they do not fill a round.
                         False: read them in a short round
    data_sharding, seed  for "cyclic": arguments of its sampler
    num_workers          how many threads or processes prepare batches in advance

    Raises ValueError for an argument out of range, and for None as data_parallel_rank or
    data_parallel_size in a job of several processes.

    Upstream differs: its settings are global, and it has no seed.

    >>> loader = build_pretraining_data_loader(range(8), 0, micro_batch_size=2)
    >>> next(iter(loader)), loader.state_dict()["consumed_samples"]
    (tensor([0, 1]), 2)
    """
    if dataset is None or dataloader_type == "external":
        return dataset
    n = len(dataset)
    if n == 0:  # a split for which no samples were requested
        return None
    _check_data_of_loader(dataset, data_parallel_rank, data_parallel_size)
    rank = 0 if data_parallel_rank is None else data_parallel_rank
    ranks = 1 if data_parallel_size is None else data_parallel_size
    sizes = [n, consumed_samples, micro_batch_size, rank, ranks]
    if full_validation:
        sampler = MegatronFullValidationSampler(n, rank, ranks, consumed_samples=consumed_samples)
    elif dataloader_type == "single":
        sampler = MegatronPretrainingSampler(*sizes, drop_last)
    elif dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(dataset, *sizes, data_sharding, seed=seed)
    else:
        raise ValueError(
            f"dataloader_type: expected single, cyclic or external, got {dataloader_type!r}"
        )
    is_pinned = torch.cuda.is_available()
    return PretrainingDataLoader(dataset, sampler, num_workers, pin_memory=is_pinned)


# -- How a batch is read -----------------------------------------------------------------------


def _make_batch(dataset: typing.Any, indices: typing.Sequence[int | None]) -> dict:
    """Return the samples with these indices, stacked: {key: tensor (B, ...)}.

    If the C kernels are available, section 18 replaces this function.
    """
    return torch.utils.data.default_collate(_getitems(dataset, indices))


def _getitems(dataset: typing.Any, indices: typing.Sequence[int | None]) -> list[dict]:
    """Return several samples of any dataset, with one call to __getitems__() if possible."""
    while type(dataset) in (torch.utils.data.Subset, _PaddedSubset):
        # None, the padding sample, is passed on as it is
        indices = [k if k is None else dataset.indices[k] for k in indices]
        dataset = dataset.dataset
    if callable(getattr(dataset, "__getitems__", None)):  # None counts as missing, as in torch
        return dataset.__getitems__(indices)
    return [dataset[idx] for idx in indices]


class _PaddedSubset(torch.utils.data.Subset):
    """A Subset that passes None on to its dataset.  torch's DataLoader calls __getitems__()."""

    def __getitems__(self, indices):
        return _getitems(self, indices)


def _can_use_c(dataset: typing.Any) -> bool:
    """Return whether dataset is a GPTDataset, or a blend of GPTDatasets that share its config.

    A subclass may redefine its samples, so C is never used for it.
    """
    parts = dataset.datasets if type(dataset) is BlendedDataset else [dataset]
    return all(type(part) is GPTDataset and part.config is dataset.config for part in parts)


def _read_gpt_samples(dataset, indices):
    """Return several samples of a GPTDataset.  Their pieces are read together."""
    if type(dataset) is not GPTDataset:  # a subclass may override __getitem__()
        return [dataset[idx] for idx in indices]
    pieces_of_samples = [dataset.pieces(0 if idx is None else idx) for idx in indices]
    parts = iter(_read_pieces(dataset.dataset, list(itertools.chain(*pieces_of_samples))))
    samples = []
    for idx, pieces in zip(indices, pieces_of_samples, strict=True):
        row = np.concatenate([next(parts) for _ in pieces], dtype=np.int64)
        samples.append(dataset._make_sample(idx, row))
    return samples


def _read_blend_samples(blend, indices):
    """Return several samples of a blend, with one call for each dataset that they come from."""
    if type(blend) is not BlendedDataset:  # a subclass may override __getitem__()
        return [blend[idx] for idx in indices]
    samples = [None] * len(indices)
    for d, (rows, ks) in _rows_of_datasets(blend, indices).items():
        for row, sample in zip(rows, _getitems(blend.datasets[d], ks), strict=True):
            dataset_id = torch.from_numpy(np.array(d, np.int64))
            samples[row] = {"dataset_id": dataset_id, **sample}
    return samples


def _rows_of_datasets(blend, indices):
    """Group samples of a blend by dataset: return {d: (rows, ks)}.

    Sample indices[rows[p]] of the blend is sample ks[p] of dataset d.
    """
    rows_of_datasets = {}
    for row, idx in enumerate(indices):
        d, k = blend._locate(idx)
        rows, ks = rows_of_datasets.setdefault(d, ([], []))
        rows.append(row)
        ks.append(k)
    return rows_of_datasets


# -- The history: what determines the samples -----------------------------------------------------


def _provenance_of(dataset, n, memo):
    """Return what determines the first n samples of a dataset: {setting: value}.

    n      None: all samples of the dataset
    memo   a dict with results of earlier calls, {id(dataset): result}
    """
    if isinstance(dataset, BlendedDataset):
        return _provenance_of_blend(dataset, n, memo)
    data = getattr(dataset, "dataset", None)
    if isinstance(dataset, torch.utils.data.Subset):
        indices = np.asarray(dataset.indices[:n], np.int64)
        if np.any(indices < 0):  # -1 is the last sample
            indices = indices % len(data)
        n = int(indices.max()) + 1
        settings = {"class": "Subset", "indices": _md5(indices.tobytes())}
    else:
        if id(dataset) not in memo:
            memo[id(dataset)] = _settings_of(dataset)
        settings = memo[id(dataset)]
        if isinstance(dataset, torch.utils.data.ConcatDataset):
            return settings | _provenance_of_parts(dataset, n, memo)
        if data is None or isinstance(dataset, GPTDataset):  # its settings cover its pair
            return settings
    return settings | {"data": _provenance_of(data, n, memo)}


def _provenance_of_parts(concat, n, memo):
    """Return what determines the first n samples of a ConcatDataset.

    The result has an entry for each dataset that gives some of these samples.  So datasets may be
    added at the end, and the last dataset that gave a sample may grow.
    """
    firsts = []
    settings = {"first sample of each dataset": firsts}
    for part, end in zip(concat.datasets, concat.cumulative_sizes, strict=True):
        begin = end - len(part)
        if begin < end and (n is None or begin < n):  # an empty dataset gives no sample
            own_n = None if n is None else min(n, end) - begin
            settings[f"dataset {len(firsts)}"] = _provenance_of(part, own_n, memo)
            firsts.append(begin)
    return settings


def _provenance_of_blend(blend, n, memo):
    """Return what determines the first n samples of a blend.

    memo keeps the checksum and the counts of the last call, and a call with a larger n continues
    from them: reading 10^9 entries takes seconds.
    """
    if n is None:
        settings = {"weights": blend.weights, "blend_phases": blend.phases, "size": blend.size}
        counts = np.ones(len(blend.datasets))  # all datasets give samples
    else:
        last_n, checksum, counts = memo.get(id(blend), (0, 0, 0))
        if last_n > n:
            last_n, checksum, counts = 0, 0, 0
        new = np.ascontiguousarray(blend.dataset_index[last_n:n], np.int16)
        checksum = zlib.crc32(new, checksum)
        counts = np.add(counts, _samples_per_dataset(new, len(blend.datasets)))
        memo[id(blend)] = n, checksum, counts
        settings = {"which corpus gave which sample (weights, blend_phases)": checksum}
        if type(blend)._build_indices is not BlendedDataset._build_indices:
            samples = np.ascontiguousarray(blend.dataset_sample_index[:n], np.int64)
            settings["which sample each corpus gave"] = zlib.crc32(samples)
    provenance = {"class": type(blend).__name__}
    for d in np.flatnonzero(counts):
        provenance[f"corpus {d}"] = _provenance_of(blend.datasets[d], None, memo)
    return provenance | settings


def _settings_of(dataset):
    """Return what determines the samples of a dataset that is neither a blend nor a Subset.

    unique_identifiers has the values as of the build; the config may have changed since then.
    """
    label = os.path.basename(_label_of_dataset(dataset))
    settings = {"class": type(dataset).__name__, _LABEL_KEY: label}
    is_gpt = isinstance(dataset, GPTDataset)
    reader = dataset.dataset if is_gpt else dataset
    if callable(getattr(reader, "fingerprint", None)):
        settings["fingerprint"] = reader.fingerprint()
    if is_gpt or isinstance(reader, IndexedDataset):
        settings |= _lengths_in_use(reader, "sequence_lengths (CRC-32)")  # section 15
    if not isinstance(dataset, MegatronDataset):
        return settings
    settings["documents (split)"] = _digest_of_documents(dataset)
    if is_gpt:
        return settings | _settings_of_orders(dataset)
    for name, value in dataset.unique_identifiers.items():
        if name not in ("dataset_path", "num_samples", "index_split", "split", "split_matrix"):
            settings[name] = value
    if isinstance(dataset, SFTDataset):
        settings["context_parallel_size"] = dataset.config.context_parallel_size or 1
    return settings


def _settings_of_orders(dataset):
    """Return what determines which tokens are in the samples of a GPTDataset, and their order."""
    identifiers = dataset.unique_identifiers
    settings = {"sequence_length": identifiers["sequence_length"]}
    for name in ("add_extra_token_to_sequence", "drop_last_partial_validation_sequence"):
        settings[name] = identifiers.get(name, True)
    method = GPTDataset._build_document_sample_shuffle_indices
    if type(dataset)._build_document_sample_shuffle_indices is not method:
        for name in dataset.index_names:
            settings[f"{name} (CRC-32)"] = zlib.crc32(np.ascontiguousarray(getattr(dataset, name)))
        return settings
    settings["random_seed"] = identifiers["random_seed"]
    by_epochs_key, epochs_key, last_epoch_key = _EPOCH_KEYS
    plan = dataset.epoch_plan
    # With stable_order, each epoch is shuffled separately, as a single epoch always is.  Adding
    # epochs then leaves earlier samples unchanged, but a short last sample moves to the end.
    is_by_epochs = identifiers.get("stable_order", False) or plan.num_epochs == 1
    settings[by_epochs_key] = is_by_epochs
    if not is_by_epochs or not settings["drop_last_partial_validation_sequence"]:
        settings[epochs_key] = plan.num_epochs
    if not is_by_epochs:
        settings[last_epoch_key] = plan.separate_final_epoch
    return settings


# -- Comparing two histories ---------------------------------------------------------------------


def _check_same_history(saved, current):
    """Raise a ValueError that names the first difference between two histories, if they differ."""
    if _first_difference(saved, current) is not None:
        difference = _label_of_difference(saved, current, " in the state")
        advice = ""
        if difference.startswith("which corpus ") and saved.get("kind of the sampler") == "single":
            advice = "To change the weights from here on, use blend_phases: first the earlier "
            advice += "weights, for the samples consumed so far, and then the new ones.  "
        raise ValueError(
            f"cannot resume: {difference}.  {advice}To resume exactly, restore the data, the "
            "settings and the version of megatron_min that the saved run used.  To resume anyway, "
            "at the risk of repeating or skipping samples, call load_state_dict(state, "
            "strict=False).  (A run that is to grow needs stable_order=True in its first job.)"
        )


def _parse_history(text):
    """Return the history in a JSON text as one dict: the values of the sampler and of the data."""
    history = json.loads(text)
    return history.get("sampler", {}) | history.get("data", {})


def _first_difference(was, now):
    """Return the difference to report, as (name, value in was, value in now), or None.

    was, now   dicts; values that are dicts in both are compared key by key
    """
    return min(_iter_differences(was, now, ""), key=_is_secondary, default=None)


def _label_of_difference(was, now, where=""):
    """Return the difference to report as "bin_size was 13, and is 16" or "lengths_crc32 differs".

    where   what follows the old value, such as " in the state"
    """
    name, *values = _first_difference(was, now)
    old, new = ("not set" if value is None else value for value in values)
    if re.search("crc-?32|^which |[0-9a-f]{32}", f"{name} {old} {new}", re.IGNORECASE):
        return f"{name} differs"  # the value of a checksum tells the reader nothing
    return f"{name} was {old}{where}, and is {new}"


def _is_secondary(difference):
    """Return whether a difference usually results from another one, and so is reported last."""
    name, was, now = difference
    return name.startswith(_EPOCH_KEYS) or was is None or now is None


def _iter_differences(was, now, suffix):
    """Yield each difference as (name, value in was, value in now), with None for a missing value.

    suffix   the end of the names, such as " of corpus 1 (wiki)"
    """
    for key in was | now:
        old, new = was.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            labels = [str(each[_LABEL_KEY]) for each in (old, new) if _LABEL_KEY in each]
            label = f" ({', then '.join(dict.fromkeys(labels))})" if labels else ""
            yield from _iter_differences(old, new, f" of {key}{label}{suffix}")
        elif old != new and key != _LABEL_KEY:
            yield f"{key}{suffix}", old, new


# ==============================================================================
# 11. Gradients
# ==============================================================================
# Question: how do all data-parallel ranks get the same gradients?
#
# All data-parallel ranks start with the same parameters.  In each step, every rank computes the
# gradients of its micro-batches.  Then all ranks replace their gradients by the average over the
# ranks.  They make the same update, and their parameters stay equal.
#
# If each rank computes a mean loss over its tokens, and every rank counts the same number of
# tokens, the average is the gradient of the global batch.  If the counts may differ, each rank
# computes a sum of losses.  finalize_model_grads() then adds the gradients over all ranks, and
# divides them by the number of tokens on all ranks.
#
# The average is computed by a collective, a call that all ranks of a group make together:
#
#   all-reduce       Every rank receives the sum (or the average) of the buffers of all ranks.
#   reduce-scatter   The sum (or the average) is cut into one shard for each rank, and each rank
#                    receives its own shard.  This is enough for an optimizer that updates only the
#                    parameters of its shard, and then sends them to the other ranks itself.
#
# All gradients of one dtype and device are in one buffer.  They are in reverse order, because
# backward reaches the last parameters first.  For each parameter p, p.main_grad is a view of the
# buffer:
#
#   parameters of the module             embed  w1  w2  w3  head
#   their gradients in the buffer        | head     | w3  w2   | w1  embed |
#   sent together                        | bucket 0 | bucket 1 | bucket 2  |
#
# Backward adds each gradient to p.grad, which is the same view.  Small gradients can get lost in a
# bfloat16 sum, in which 256 + 1 is 256.  grad_reduce_in_fp32 avoids this, because p.main_grad is
# then float32.  Backward creates a new p.grad for each micro-batch, which is added to p.main_grad
# and dropped.
#
# This is a step with overlap_grad_reduce.  Time runs to the right, and each bar is a bucket that is
# being sent.  Without overlap_grad_reduce, finish_grad_sync() sends all buckets and then waits.
#
#   gradient arrives     head     w3     w2     w1     embed
#   bucket 0                 =============
#   bucket 1                                =============
#   bucket 2                                                =============
#   finish_grad_sync()                                        waits for all   |
#
# A bucket is sent when all its gradients have arrived and all buckets before it have been sent.
# All ranks therefore send the buckets in the same order, even if their batches use different
# parameters.  If a parameter gets no gradient, zeros are sent for it, and its bucket and all later
# buckets wait until finish_grad_sync().  A parameter with two names in the model is in the buffer
# once, at the position of its first name.


@dataclasses.dataclass
class _Bucket:
    """Parameters whose gradients are sent together, by one collective.

    params   the parameters
    data     their gradients: a slice of the buffer, in the order of params
    waiting  parameters whose last gradient of this step is still to arrive; only
             overlap_grad_reduce uses it
    handle   the collective that is still running, or None

    Upstream: _ParamAndGradBucket.
    """

    params: list[torch.nn.Parameter]
    data: torch.Tensor
    waiting: set[torch.nn.Parameter]
    handle: "torch.distributed.Work | None" = None


class DistributedDataParallel(torch.nn.Module):
    """A model whose gradients are averaged over a group of ranks.

    module                     the model.  Each parameter that requires a gradient gets main_grad, a
                               view of the buffer of its dtype and device, and its grad becomes the
                               same view.  (torch's optimizers read grad and may set it to None.
                               Upstream's optimizers read main_grad, which stays a view.)
    group                      the process group to average over, usually the group "dp-cp" of
                               section 9, because cp ranks have the same weights and different
                               tokens.  None: all ranks, which is right only without tp and pp
    bucket_size                minimum number of elements in a bucket (the last bucket of a buffer
                               may be smaller)
    overlap_grad_reduce        True: send each bucket during backward.  False: send all buckets in
                               finish_grad_sync()
    use_distributed_optimizer  True: use reduce-scatter.  Only this rank's slice of each bucket (see
                               grad_shards) becomes the average.  False: use all-reduce
    average_in_collective      True: the collective divides by the number of ranks, if the backend
                               is NCCL.  Otherwise the gradients are divided before they are sent
    check_for_nan_in_grad      True: if a gradient is nan or inf, finish_grad_sync() raises
                               ValueError on every rank, with the name of the parameter
    grad_reduce_in_fp32        True: add and average in float32, whatever the dtype of a parameter.
                               grad is None until finish_grad_sync() sets it to main_grad, converted
                               to the dtype of the parameter.  Only zero_grad_buffer() clears
                               main_grad and begins a step; setting grad to None does neither

    grad_buffers   list of tensors: one buffer for each dtype and device
    grad_shards    list of tensors: this rank's slice of each bucket

    Convert (with module.to()), replace, freeze and unfreeze parameters before wrapping the model.

    In each step, call zero_grad_buffer(), then run forward and backward of each micro-batch, and
    then call finish_grad_sync() and the optimizer.  Run all micro-batches but the last under
    no_sync().

    >>> model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    >>> model.zero_grad_buffer()
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> model.finish_grad_sync()
    >>> model.grad_buffers[0].tolist(), model.module.weight.grad.tolist()
    ([3.0, 4.0], [[3.0, 4.0]])

    Upstream differs: the keyword options are fields of a DistributedDataParallelConfig.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: "torch.distributed.ProcessGroup | None" = None,
        *,
        bucket_size: int = 40_000_000,
        overlap_grad_reduce: bool = False,
        use_distributed_optimizer: bool = False,
        average_in_collective: bool = False,
        check_for_nan_in_grad: bool = False,
        grad_reduce_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.size = _world_size(group)
        if self.size > 1 and torch.distributed.get_backend(group) != "nccl":
            average_in_collective = False  # gloo may return the sum even if asked for the average
        self.bucket_size = bucket_size
        self.overlap_grad_reduce = overlap_grad_reduce
        self.use_distributed_optimizer = use_distributed_optimizer
        self.average_in_collective = average_in_collective
        self.check_for_nan_in_grad = check_for_nan_in_grad
        self.grad_reduce_in_fp32 = grad_reduce_in_fp32
        self._sync_enabled = True  # False under no_sync()
        self._make_buffers()

    def _make_buffers(self):
        """Make all buffers, and register a hook on each parameter.

        This and zero_grad_buffer() set these attributes:

        _names               {parameter: its name}
        _buckets             list of all buckets, in the order in which they are sent
        _bucket_of           {parameter: index of its bucket in _buckets}
        _slices              {parameter: its slice of the buffer, 1-D}
        _num_sent            how many buckets have been sent in this step
        _grads_are_averaged  True from the end of finish_grad_sync() until a gradient arrives or
                             zero_grad_buffer() is called
        _not_finite          names of parameters for which this rank has sent nan or inf
        """
        self.grad_buffers = []
        self.grad_shards = []
        self._names = {param: name for name, param in self.module.named_parameters()}
        self._buckets = []
        self._bucket_of = {}
        self._slices = {}
        params_of = {}  # {(dtype of the gradient, device): its parameters, in reverse order}
        for param in reversed(self._names):
            if param.requires_grad:
                dtype = torch.float32 if self.grad_reduce_in_fp32 else param.dtype
                params_of.setdefault((dtype, param.device), []).append(param)
                # A parameter keeps its hooks.  The reference to self is weak, so that an unused
                # wrapper is freed, and gets no more gradients if the module is wrapped again.
                hook = functools.partial(_gradient_hook, weakref.ref(self))
                param.register_post_accumulate_grad_hook(hook)
        for (dtype, device), params in params_of.items():
            self._add_buffer(params, dtype, device)
        self.zero_grad_buffer()

    def _add_buffer(self, params, dtype, device):
        """Make the buffer of one dtype and device, its buckets, and the slice of each parameter."""
        params_of_buckets = [[]]
        sizes = [0]  # the number of elements in each bucket
        for param in params:
            if sizes[-1] >= self.bucket_size:
                params_of_buckets.append([])
                sizes.append(0)
            params_of_buckets[-1].append(param)
            sizes[-1] += param.numel()
        # Each bucket is padded with zeros, so that it can be cut into one equal shard per rank.
        sizes = [_ceil_div(size, self.size) * self.size for size in sizes]
        buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.grad_buffers.append(buffer)
        for members, data in zip(params_of_buckets, buffer.split(sizes), strict=True):
            start = 0
            for param in members:
                self._slices[param] = data[start : start + param.numel()]
                self._bucket_of[param] = len(self._buckets)
                start += param.numel()
            self.grad_shards.append(data.chunk(self.size)[_rank(self.group)])
            self._buckets.append(_Bucket(members, data, waiting=set(members)))

    def forward(self, *inputs: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> typing.Iterator[None]:
        """Suspend sending: in this block, backward only adds to the gradients."""
        before = self._sync_enabled
        self._sync_enabled = False
        try:
            yield
        finally:
            self._sync_enabled = before

    def _on_gradient(self, param):
        """Handle a gradient that backward has just added, and send the complete buckets."""
        _check_gradient_in_time(self, param)
        self._put_into_buffer(param)
        self._grads_are_averaged = False
        if self._sync_enabled and self.overlap_grad_reduce:
            self._buckets[self._bucket_of[param]].waiting.discard(param)
            while self._num_sent < len(self._buckets):
                if self._buckets[self._num_sent].waiting:
                    break
                self._send_next_bucket()

    def _put_into_buffer(self, param):
        """Make param.main_grad include what backward has added to param.grad."""
        if self.grad_reduce_in_fp32:
            if param.grad is not None:
                param.main_grad.add_(param.grad)
            param.grad = None
            return
        # param.grad is main_grad, unless somebody has set it to None, which means zero.  If
        # backward ran after that, param.grad is a new tensor.
        if param.grad is None:
            param.main_grad.zero_()
        elif param.grad is not param.main_grad:
            param.main_grad.copy_(param.grad)
        param.grad = param.main_grad

    def _send_next_bucket(self):
        """Start the collective of the first bucket that has not been sent in this step."""
        bucket = self._buckets[self._num_sent]
        shard = self.grad_shards[self._num_sent]  # a slice of the bucket, so it is reduced in place
        self._num_sent += 1
        for param in bucket.params:
            self._put_into_buffer(param)
            if self.check_for_nan_in_grad and not param.main_grad.isfinite().all():
                self._not_finite.append(self._names[param])
        if self.size == 1:
            return
        operation = torch.distributed.ReduceOp.AVG
        if not self.average_in_collective:
            operation = torch.distributed.ReduceOp.SUM
            bucket.data.mul_(1 / self.size)
        if self.use_distributed_optimizer:
            shards = list(bucket.data.chunk(self.size))
            bucket.handle = torch.distributed.reduce_scatter(
                shard, shards, operation, self.group, async_op=True
            )
        else:
            bucket.handle = torch.distributed.all_reduce(
                bucket.data, operation, self.group, async_op=True
            )

    def start_grad_sync(self) -> None:
        """Send the buckets that have not been sent during backward."""
        if self._grads_are_averaged:
            return
        while self._num_sent < len(self._buckets):
            self._send_next_bucket()

    def finish_grad_sync(self) -> None:
        """Send the remaining buckets, and wait for all buckets.

        Every rank of the group must call this method.  If neither a gradient has arrived nor
        zero_grad_buffer() has been called since the last call, nothing is sent.

        Raises ValueError if a parameter was replaced, frozen or unfrozen after the model was
        wrapped.  With check_for_nan_in_grad, also raises ValueError, on every rank of the group, if
        a rank has sent nan or inf.
        """
        if not self._grads_are_averaged:
            self.start_grad_sync()
            self._wait_and_reset()
            self._grads_are_averaged = True
            self._set_grads()
        if self.check_for_nan_in_grad:
            _call_and_wait(self._report_not_finite, self.group)  # section 17
        # This check comes last, so that a rank on which it fails has already sent everything that
        # the other ranks wait for in this method.
        _check_parameters(self)

    def _set_grads(self):
        """With grad_reduce_in_fp32, set each param.grad to main_grad once the average is known."""
        if self.grad_reduce_in_fp32 and self._grads_are_averaged:
            for param in self._slices:
                param.grad = param.main_grad.to(param.dtype)

    def _report_not_finite(self):
        """Raise ValueError if this rank has sent nan or inf, and clear the list of parameter names.

        The message names the first five parameters.
        """
        names = self._not_finite
        self._not_finite = []
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            advice = "check the loss, the learning rate and the samples of this step"
            raise ValueError(f"nan or inf in gradients of {', '.join(names[:5])}{more}; {advice}")

    def _wait_and_reset(self):
        """Wait for all running collectives, and let all buckets be sent again."""
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
            bucket.waiting = set(bucket.params)
        self._num_sent = 0

    def zero_grad_buffer(self) -> None:
        """Begin a step: set all gradients to 0, and each param.main_grad to its view of a buffer.

        If no gradient arrives on a rank in this step, finish_grad_sync() sends zeros from that
        rank, so the other ranks do not wait for it.

        Raises ValueError if a parameter was replaced, frozen or unfrozen after the model was
        wrapped.
        """
        _check_parameters(self)
        for param, values in self._slices.items():
            param.main_grad = values.view(param.shape)
            param.grad = None
            if not self.grad_reduce_in_fp32:
                param.grad = param.main_grad
        self._wait_and_reset()
        self._grads_are_averaged = False
        self._not_finite = []
        for buffer in self.grad_buffers:
            buffer.zero_()

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by factor."""
        for buffer in self.grad_buffers:
            buffer.mul_(factor)
        self._set_grads()

    def broadcast_params(self) -> None:
        """Copy all parameters, frozen ones included, from the first rank of the group to all ranks.

        Call this once if the parameters may differ between ranks.  (torch's own
        DistributedDataParallel does so in its constructor.)
        """
        if self.size == 1:
            return
        for param in self.module.parameters():
            torch.distributed.broadcast(param.data, group=self.group, group_src=0)

    def __setstate__(self, state: dict) -> None:
        """Make new buffers and hooks for a copy or an unpickled object.  torch copies no hooks."""
        super().__setstate__(state)
        self._make_buffers()


def _gradient_hook(wrapper, param):
    """Pass a new gradient to the DistributedDataParallel that wrapper refers to, if it exists."""
    ddp = wrapper()
    if ddp is not None:
        ddp._on_gradient(param)


def finalize_model_grads(
    model: list[DistributedDataParallel],
    num_tokens: int | torch.Tensor | None = None,
    groups: ParallelGroups | None = None,
) -> None:
    """Finish the gradients of a step.

    model       list of the parts of the model on this rank
    num_tokens  for a loss that is a sum over tokens: how many tokens count on this rank; an int on
                every rank, or a tensor on every rank.  The gradients then become the gradients
                of the mean loss per token.  None: they stay the average over ranks
    groups      a ParallelGroups: num_tokens is summed over its dp-cp ranks.  None: it is summed
                over the group of each part

    With num_tokens, the average over R ranks is multiplied by R / (tokens of all ranks).  With
    several pipeline stages, the trainer must send num_tokens from the last stage, which has the
    loss mask, to all stages.

    >>> model = DistributedDataParallel(torch.nn.Embedding(257, 1))    # one weight for each token
    >>> model(torch.tensor([97, 97, 97, 98])).sum().backward()         # a a a b
    >>> finalize_model_grads([model], num_tokens=4)
    >>> model.module.weight.grad[97:99, 0].tolist()                    # 3 and 1 of the 4 tokens
    [0.75, 0.25]
    """
    for part in model:
        part.finish_grad_sync()
        if num_tokens is None:
            continue
        total = torch.as_tensor(num_tokens, device=_device_of_group(part.group)).clone()
        group = part.group if groups is None else groups.group("dp-cp")
        if _is_distributed():
            torch.distributed.all_reduce(total, group=group)
        total = total.item()
        if total != 0:  # if no token counts, all gradients are 0 already
            part.scale_gradients(part.size / total)


def forward_backward_no_pipelining(
    *,
    forward_step_func: typing.Callable,
    data_iterator: typing.Iterator | None,
    model: torch.nn.Module | typing.Sequence[torch.nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    decoder_seq_length: int | None = None,
) -> list[typing.Any]:
    """Run the micro-batches of a step, finish the gradients, and return the reports.

    forward_step_func  function (data_iterator, model) -> (output, loss_func).  loss_func(output)
                       returns one of these, with any value as its report:
                         (loss, report)                        gradient of the mean of the losses
                         (sum of losses, num_tokens, report)   gradient of the mean loss per token
                       The mean is over all micro-batches of this rank.  If the model is or contains
                       a DistributedDataParallel of this module, the mean is over all ranks, too
    data_iterator      passed on to forward_step_func
    model              a DistributedDataParallel, a plain module, or a list with one of these
    num_microbatches   how many micro-batches to run
    forward_only       True: run no backward, and send nothing.  Call it under torch.no_grad()
    seq_length, micro_batch_size, decoder_seq_length
                       accepted and ignored
    Returns            list of the reports, one for each micro-batch

    Raises ValueError if num_microbatches is less than 1.  Also raises ValueError, unless
    forward_only is set, if loss_func returns a sum but one of torch's wrappers averages the
    gradients over several ranks.

    This is a step on the toy corpus, in one process.  The model is a table.  The row of a byte has
    one number for each byte that may follow: 256 of them, because the toy corpus has no eod.  All
    numbers are 0, so all 256 bytes are equally likely.

    >>> config = GPTDatasetConfig(1234, 4, blend=([toy_corpus()], None), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, [3, 0, 0], lambda: True, config)
    >>> train, _, _ = builder.build()
    >>> groups = ParallelGroups()
    >>> sampler = MegatronPretrainingSampler(len(train), 0, 1, groups.rank("dp"), groups.size("dp"))
    >>> table = torch.nn.Embedding(256, 256, _weight=torch.zeros(256, 256))
    >>> model = DistributedDataParallel(table, groups.group("dp-cp"))
    >>> def forward_step(batches, model):
    ...     batch = get_batch(batches, groups, micro_batch_size=1, sequence_length=4)
    ...     logits = model(batch["tokens"])                                    # (1, 4, 256)
    ...     losses = torch.nn.functional.cross_entropy(
    ...         logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    ...     loss_mask = batch["loss_mask"].flatten()
    ...     def loss_func(losses):
    ...         loss = (losses * loss_mask).sum()
    ...         return loss, loss_mask.sum(), loss.item()
    ...     return losses, loss_func
    >>> model.zero_grad_buffer()
    >>> reports = forward_backward_no_pipelining(forward_step_func=forward_step, model=model,
    ...     data_iterator=batches_of(train, sampler), num_microbatches=2)
    >>> [round(loss / math.log(256), 3) for loss in reports]       # four labels in each micro-batch
    [4.0, 4.0]

    The eight tokens, each with its label, are bb bb bc cc and cc cc cc cc.  The gradient of an
    entry is (how often its row was read / 256 - how often its label followed) / 8.

    >>> row_of_b = table.weight.grad[ord("b")]
    >>> [row_of_b[ord(letter)].item() * 8 * 256 for letter in "abc"]  # 3, 3 - 2 * 256, 3 - 256
    [3.0, -509.0, -253.0]
    """
    if isinstance(model, (list, tuple)):
        [model] = model  # without pipelining, a rank has one part
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    # A wrapper, such as torch.compile()'s, may contain the DistributedDataParallel.
    parts = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    reports = []
    token_counts = []
    for number in range(num_microbatches):
        with contextlib.ExitStack() as stack:
            if number < num_microbatches - 1:
                for part in parts:
                    stack.enter_context(part.no_sync())
            output, loss_func = forward_step_func(data_iterator, model)
            result = loss_func(output)
            if len(result) == 3:
                if not forward_only:
                    _check_loss_is_mean(model)
                loss, tokens, report = result
                token_counts.append(tokens)
            else:
                loss, report = result
                loss = loss / num_microbatches
            if not forward_only:
                loss.backward()
        reports.append(report)
    if forward_only:
        return reports
    num_tokens = sum(token_counts) if token_counts else None
    if parts:
        finalize_model_grads(parts, num_tokens)
    elif num_tokens:  # neither None nor 0
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= num_tokens
    return reports


# ==============================================================================
# 12. Around the loop
# ==============================================================================
# Question: how many samples does a run need, and how can a step be repeated?
#
#   get_train_valid_test_num_samples   how many samples a run needs of each split
#   NumMicroBatches                    how many micro-batches a step has: constant or growing
#   cyclic_iter                        reads a loader pass after pass
#   RerunDataIterator                  reads the micro-batches of a step again
#   check_data_consistency             checks that all ranks continue at the same sample


def get_train_valid_test_num_samples(
    *,
    global_batch_size: int,
    eval_interval: int,
    eval_iters: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
    full_validation: bool = False,
    skip_train: bool = False,
) -> tuple[int, int | None, int]:
    """Return how many samples a run needs of train, valid and test.

    global_batch_size   samples in a step
    eval_interval       the run evaluates valid every eval_interval steps, and at the end
    eval_iters          global batches that each evaluation reads; test is evaluated once
    train_iters         steps of the run
    train_samples       samples of the run; needed if train_iters is None.  If the batch size grows,
                        a run has more steps than train_samples / global_batch_size.  Then give both
                        arguments: train_iters is used to count the evaluations
    full_validation     True: the number for valid is None, which means all samples
    skip_train          True: the run evaluates valid once.  The number for train stays the same

    Raises ValueError if train_iters and train_samples are both None, and, unless skip_train is set,
    if eval_interval is less than 1.

    >>> get_train_valid_test_num_samples(global_batch_size=8, train_iters=100, eval_interval=50,
    ...                                  eval_iters=2)
    (800, 48, 16)
    """
    if train_samples is None and train_iters is None:
        raise ValueError("expected train_iters, train_samples or both, got neither")
    global_batch_size = _as_whole(global_batch_size, "global_batch_size", 1)
    if train_samples is None:
        train_samples = _as_whole(train_iters, "train_iters") * global_batch_size
    train_samples = _as_whole(train_samples, "train_samples")
    if train_iters is None:
        train_iters = train_samples // global_batch_size
    evaluations = 1
    if not skip_train:
        eval_interval = _as_whole(eval_interval, "eval_interval", 1)
        evaluations += _as_whole(train_iters, "train_iters") // eval_interval
    test_samples = _as_whole(eval_iters, "eval_iters") * global_batch_size
    return train_samples, None if full_validation else evaluations * test_samples, test_samples


class NumMicroBatches:
    """The number of micro-batches in a step, which is constant or grows.

    global_batch_size    samples in a step, on all data-parallel ranks together
    micro_batch_size     samples in a micro-batch
    data_parallel_size   number of data-parallel ranks
    rampup_batch_size    (start, increment, samples): the global batch size grows from start to
                         global_batch_size by equal increments, during the first `samples` samples
                         of the run.  None: it is constant

    Raises ValueError if the increments do not lead to global_batch_size, or if a global batch size
    is not a multiple of micro_batch_size * data_parallel_size.

    >>> ramp = NumMicroBatches(32, 4, 2, rampup_batch_size=(16, 8, 100))
    >>> for consumed in (0, 50, 101):
    ...     ramp.update(consumed)
    ...     print(ramp.get(), ramp.get_current_global_batch_size())
    2 16
    3 24
    4 32

    Upstream: num_microbatches_calculator.
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        rampup_batch_size: typing.Sequence[int] | None = None,
    ) -> None:
        ramp = rampup_batch_size or (global_batch_size, 1, 0)  # one size from the start
        start, increment, self.samples = ramp
        self.global_batch_size = operator.index(global_batch_size)
        micro_batch_size = operator.index(micro_batch_size)
        self.samples_per_round = micro_batch_size * operator.index(data_parallel_size)
        self.sizes = range(start, self.global_batch_size + 1, increment)
        _check_rampup(self.sizes, global_batch_size, self.samples_per_round)
        self.update(0)

    def update(self, consumed_samples: int) -> None:
        """Set the batch size of the step that begins after consumed_samples samples of the run."""
        consumed_samples = operator.index(consumed_samples)
        increments = len(self.sizes) - 1
        if increments and self.samples and consumed_samples <= self.samples:
            samples_per_increment = self.samples / increments
            self._current = self.sizes[int(consumed_samples / samples_per_increment)]
        else:
            self._current = self.sizes[-1]

    def get(self) -> int:
        """Return the number of micro-batches of the current step."""
        return self._current // self.samples_per_round

    def get_current_global_batch_size(self) -> int:
        """Return the number of samples of the current step."""
        return self._current


def cyclic_iter(iterable: typing.Iterable) -> typing.Iterator:
    """Yield the items of an iterable again and again, pass after pass.

    One pass may be empty, for example if a run resumes at the end of a pass.  Raises ValueError
    after two empty passes in a row, because the loop would never end.

    >>> list(itertools.islice(cyclic_iter([1, 2, 3]), 7))
    [1, 2, 3, 1, 2, 3, 1]
    """
    empty_passes = 0
    while empty_passes < 2:
        empty_passes += 1
        for item in iterable:
            empty_passes = 0
            yield item
    raise ValueError(
        "cyclic_iter: two passes in a row yielded nothing; if the iterable is a loader, check that "
        "its dataset fills a round (micro_batch_size * data_parallel_size samples)"
    )


class RerunDataIterator(collections.abc.Iterator):
    """An iterator that can yield its last micro-batches again, to run a step a second time.

    rewind() returns to the last advance(), or to the beginning.  Call advance() after each step,
    because all micro-batches since the last advance() are kept in memory.  A dict is yielded as a
    shallow copy, so a step may change its keys.

    >>> numbers = RerunDataIterator(range(9))
    >>> next(numbers), next(numbers), numbers.rewind(), next(numbers), next(numbers)
    (0, 1, None, 0, 1)
    """

    def __init__(self, iterable: typing.Iterable) -> None:
        # The names of these three attributes are upstream's.
        self.iterable = iter(iterable)
        self.saved_microbatches = []  # all micro-batches read since the last advance()
        self.replay_pos = 0  # index of the next micro-batch in this list; at its end, read iterable

    def __next__(self) -> typing.Any:
        if self.replay_pos == len(self.saved_microbatches):
            self.saved_microbatches.append(next(self.iterable))
        item = self.saved_microbatches[self.replay_pos]
        self.replay_pos += 1
        return item.copy() if isinstance(item, dict) else item

    def rewind(self) -> None:
        """Make the iterator yield all micro-batches since the last advance() again."""
        self.replay_pos = 0

    def advance(self) -> None:
        """Forget the micro-batches that were yielded, because their step is done."""
        del self.saved_microbatches[: self.replay_pos]
        self.replay_pos = 0

    def state_dict(self) -> dict:
        """Return the micro-batches since the last advance(), and the position among them."""
        return {
            "saved_microbatches": list(self.saved_microbatches),
            "replaying": self.replay_pos < len(self.saved_microbatches),
            "replay_pos": self.replay_pos,
        }

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue where the state was saved.

        The iterable must itself resume after the micro-batches that are in the state.
        """
        self.saved_microbatches = list(state_dict["saved_microbatches"])
        self.replay_pos = len(self.saved_microbatches)
        if state_dict["replaying"]:
            self.replay_pos = state_dict["replay_pos"]


def check_data_consistency(consumed_samples: int, group: typing.Any = None) -> None:
    """Check that all ranks of a group continue at the same number of consumed samples.

    consumed_samples  number of samples on this rank, usually from a checkpoint
    group             a process group of torch.distributed.  None: all ranks

    Raises ValueError on every rank if the numbers differ.
    """
    if not _is_distributed():
        return
    mine = operator.index(consumed_samples)
    bounds = torch.tensor([mine, -mine], device=_device_of_group(group))
    torch.distributed.all_reduce(bounds, torch.distributed.ReduceOp.MIN, group=group)
    least, minus_most = bounds.tolist()
    if least != -minus_most:
        raise ValueError(
            f"consumed_samples differs between ranks, from {least} to {-minus_most} (rank "
            f"{_rank()} has {mine}); load the same checkpoint on every rank"
        )


# ==============================================================================
# PART III: THE WORKSHOP
# ==============================================================================
#
# ==============================================================================
# 13. What is checked
# ==============================================================================
# Question: what is checked, when, and which error is raised?
#
#   input                  what may be wrong                            when it is checked  result
#
#   a pair                 a file is missing                            opening             (b)
#                          header, file size or last entries            opening             (a)
#                          a file changes while the pair is opened      opening             (a)
#                          any entry of the .idx                        verify()            (a)
#                          a sequence is not in the .bin                each access         (a)
#   a position             it is not in the sequence or dataset         each access         (c)
#   ids, lengths, modes    they do not fit, or do not add up            before writing      (d)
#   a text, its ids        the type                                     tokenizing          (e)
#
#   a config, a blend      range of a field or weight; contradictions   when it is made     (e)
#   sizes                  negative, fractional, more than the phases   builder is made     (e)
#   corpora                too many sequences; tokenizers differ        build()             (e)
#                          too few tokens or samples                    build()             warning
#   data of the ranks      they differ                                  end of build()      (e)
#
#   loops (sections 4, 6)  dtype, shape or range of an argument         each call           (d)
#   corpus of a dataset    its entries, as by verify()                  arrays are built    (a)
#                          eods are needed, and it has none             arrays are built    warning
#   index arrays           they do not match the corpus                 each access         (c)
#
#   a sampler              a size below 1; an impossible start          made, state loaded  (e)
#   sizes of the axes      product does not divide the number of ranks  groups are made     (e)
#   a batch                wrong shape or packed; a mask is dropped     when it is read     (e)
#   rows, documents        lengths that cannot be cut for the ranks     when they are cut   (e)
#   a loader               no rank is given, but the job has several    when it is made     (e)
#                          it has no batch                              when it is made     warning
#   a state                its history differs                          when it is loaded   (e)
#   an iterator            a newer one has begun                        next batch          (f)
#   a gradient             its bucket was already sent                  when it arrives     (f)
#   a parameter            it was replaced, frozen or unfrozen          each step           (e)
#   a loss                 a sum, though torch averages the gradients   each step           (e)
#   a ramp-up              it does not lead to the batch size           when it is made     (e)
#
#   (a) DatasetFormatError, a ValueError: the message names the file and the field, the value that
#       was expected and the value that was found
#   (b) FileNotFoundError   (c) IndexError   (d) TypeError, ValueError or IndexError
#   (e) ValueError          (f) RuntimeError
#
# Object storage and the tools of part IV are not in this table.  Sections 16 and 19 to 23 have
# their own checks.


class DatasetFormatError(ValueError):
    """A file does not follow its format.  The message names the file, the field and the values."""


# -- How errors and warnings are made --------------------------------------------------------------


def _check_field(path, field, is_right, expected, actual):
    """Raise DatasetFormatError if a field of a file has an unexpected value (is_right is false)."""
    if not is_right:
        advice = "copy the file again, or preprocess again"
        if _is_remote(path):
            advice += "; delete its local copy in path_to_idx_cache"
        raise DatasetFormatError(f"{path}: {field}: expected {expected}, got {actual}; {advice}")


def _message_of(error):
    """Return the message of an error on one line.

    The class name precedes it, except for common errors such as ValueError and OSError.
    """
    message = " ".join(str(error).split())
    if isinstance(error, (ValueError, IndexError, OSError, ImportError, Warning)) and message:
        return message
    return f"{type(error).__name__}: {message}".removesuffix(": ")


@contextlib.contextmanager
def _naming_place(place):
    """Turn a ValueError or TypeError into ValueError("place: message")."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: {_message_of(error)}") from error


@contextlib.contextmanager
def _naming_failure(name, failure, kind=ValueError):
    """Put a name and a failure, such as "cannot be written", in front of the message of an error.

    An OSError stays an OSError, and keeps its errno if it has one.  MemoryError, and exceptions
    such as KeyboardInterrupt, are raised unchanged, because their cause may lie elsewhere.  Any
    other error becomes kind("name: failure: message").
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError):
            kind = OSError
            if error.errno is not None:
                reason = f"{failure}: {error.strerror}"
                raise OSError(error.errno, reason, os.fsdecode(name)) from error
        raise kind(f"{name}: {failure}: {_message_of(error)}") from error


def _warn(message):
    """Issue a warning that points to the line of the user's code.

    The line is in the innermost frame that is neither in this file nor in an installed library.  If
    no frame is, as in a thread, the warning points to the caller of this function.
    """
    site_packages = os.path.dirname(os.path.dirname(torch.__file__))
    libraries = (__file__, os.path.dirname(os.__file__), site_packages, "<frozen ")
    level = 2
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(libraries):
        level += 1
        frame = frame.f_back
    warnings.warn(message, stacklevel=2 if frame is None else level)


# -- Whole numbers and indices (all sections) ------------------------------------------------------


def _as_index(idx, n, entries):
    """Return an index as an int from 0 to n - 1; -1 is the last of the n entries.

    Raises IndexError for an index outside -n .. n - 1.  entries is a text like "samples of wiki".
    """
    i = operator.index(idx)
    if not -n <= i < n:
        raise IndexError(f"index {i} is out of range: there are {n} {entries}")
    return i % n


def _as_whole(value, name, least=0, most=math.inf):
    """Return an integer of any type as an int.  Raises ValueError unless it is in least .. most."""
    with contextlib.suppress(TypeError):
        number = operator.index(value)
        if least <= number <= most:
            return number
    limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    raise ValueError(f"{name}: expected a whole number {limits}, got {value!r}")


def _as_size(size, name):
    """Return a number of samples as an int, or None for None.  Raises ValueError for a fraction."""
    if isinstance(size, numbers.Real) and size % 1 == 0:  # 100.0 is whole, as it is for upstream
        size = int(size)
    return None if size is None else _as_whole(size, name)


def _as_counts(values, name="sizes"):
    """Return numbers of samples as an int64 array.  Raises ValueError for a fraction."""
    counts = np.array(values, np.int64)
    if not np.array_equal(counts, values):
        raise ValueError(f"{name}: expected whole numbers of samples, got {values}")
    return counts


# -- Files (sections 1 and 2) ----------------------------------------------------------------------


def _stamp_of_pair_file(path):
    """Return the stamp of the .bin or the .idx of a pair (section 15).

    Raises FileNotFoundError if the file is missing.  The message names up to five pairs in the
    folder whose names begin with the prefix, because users often give the output_prefix "wiki" of
    preprocess(), which writes the pair "wiki_text_document".  If no name begins with the prefix, it
    names the three pairs with the most similar names.
    """
    try:
        return _file_stamp(path)
    except FileNotFoundError as error:
        start = _without_ending(_without_ending(path))
        folder, name = os.path.split(start)
        bases = sorted(_without_ending(each) for each in glob.glob("*.idx", root_dir=folder))
        pairs = [each for each in bases if os.path.exists(get_bin_path(f"{folder}/{each}"))]
        begun = [each for each in pairs if each.startswith(name)]
        named = begun[:5] or difflib.get_close_matches(name, pairs, 3, 0)
        rest = len(begun or pairs) - len(named)
        reasons = [error.strerror]
        if os.path.isfile(start):
            advice = "give the prefix of a pair, which megatron-min preprocess makes"
            reasons.append(f"{name} is not a pair; {advice}")
        if named:
            more = f" and {rest:,} more" if rest > 0 else ""
            reasons.append(f"the folder holds {', '.join(named)}{more}")
        if len(reasons) == 1:
            raise
        raise FileNotFoundError(error.errno, "; ".join(reasons), path) from None


def _without_ending(path):
    """Return a path without .idx or .bin at its end: the prefix of a pair."""
    return re.sub(r"\.(idx|bin)\Z", "", path)


def _check_unchanged(path, stamp, done):
    """Raise DatasetFormatError unless a file still has this stamp.  done: "opened" or "copied"."""
    if _file_stamp(path) != stamp:
        advice = "open the pair again once no job is writing to it"
        raise DatasetFormatError(f"{path}: the file changed while it was {done}; {advice}")


def _check_idx_header(path, content, multimodal):
    """Raise DatasetFormatError if the header of an .idx file is invalid, or if its size differs.

    content is the complete file, whose size follows from the header.
    """
    size = len(content)
    _check_field(path, "file size", size >= _HEADER.size, f"at least {_HEADER.size} bytes", size)
    magic, version, code, n, m = _HEADER.unpack_from(content)
    _check_field(path, "magic (first 9 bytes)", magic == _MAGIC, _MAGIC, magic)
    _check_field(path, "version", version == _VERSION, _VERSION, version)
    _check_field(path, "dtype code", 1 <= code <= 8, "1 to 8", code)
    _check_field(path, "length of document_indices", m >= 1, "at least 1", m)
    end = 34 + 12 * n + 8 * m
    sizes = [end + n] if multimodal else [end, end + n]
    _check_field(path, "file size", size in sizes, f"{sizes[0]} bytes ({end + n} with modes)", size)


def _check_ends_of_pair(pair):
    """Raise DatasetFormatError unless the last sequence ends where the .bin ends, at a whole token.

    Also raises it unless document_indices begins with 0 and ends with the number of sequences.
    """
    n = len(pair)
    bin_size = pair._stamps["bin"]["size"]
    item = pair._token_bytes
    ends = pair.document_indices[[0, -1]].tolist()
    _check_field(pair._idx_path, "both ends of document_indices", ends == [0, n], [0, n], ends)
    end = int(pair.sequence_pointers[-1]) + int(pair.sequence_lengths[-1]) * item if n else 0
    field = "end of the last sequence, in bytes"
    _check_field(pair._idx_path, field, end % item == 0, f"a multiple of {item}", end)
    expected = f"{end} bytes of {pair.dtype.__name__} tokens, as the .idx says"
    _check_field(pair._bin_path, "file size", bin_size == end, expected, bin_size)


def _check_entries_of_idx(pair):
    """Check each entry of the .idx, as IndexedDataset.verify() says.

    The arrays are checked in chunks that fit the CPU's cache, because whole arrays would take four
    times as long and, for a billion sequences, 32 GB of memory.  Each chunk is copied, because
    unaligned reads are slow.  The arrays of the file are checked, even if a user has set different
    attributes.
    """
    chunk = 1 << 15
    in_file = pair._arrays_in_files
    all_documents = in_file["document_indices"]
    end = 0  # end of the sequence before the chunk, in bytes
    for low in range(0, max(len(in_file["sequence_lengths"]), len(all_documents)), chunk):
        num_bytes = in_file["sequence_lengths"][low : low + chunk].astype(np.int64)
        num_bytes *= pair._token_bytes
        pointers = in_file["sequence_pointers"][low : low + chunk].copy()
        ends = np.append(end, pointers + num_bytes)
        end = ends[-1]
        documents = all_documents[low : low + chunk + 1].copy()  # and the first of the next chunk
        decreases = documents[1:] < documents[:-1]
        for name, first, is_wrong, expected in (
            ("sequence_lengths", low, num_bytes < 0, "at least 0"),
            ("sequence_pointers", low, pointers != ends[:-1], "the end of the sequence before it"),
            ("document_indices", low + 1, decreases, "at least the entry before it"),
        ):
            if is_wrong.any():
                i = first + is_wrong.argmax()
                _check_field(pair._idx_path, f"{name}[{i}]", False, expected, in_file[name][i])


def _check_span(pair, i, pointer, size, offset, length):
    """Check that sequence i is in the .bin, and holds length tokens from offset on.

    Raises DatasetFormatError if the sequence is not in the .bin, which verify() would have found,
    and IndexError if it does not hold the tokens.
    """
    token_bytes = pair._token_bytes
    end = pointer + size * token_bytes
    if pointer % token_bytes or not 0 <= pointer <= end <= pair.num_tokens * token_bytes:
        actual = f"{size} tokens at byte {pointer}"
        _check_field(pair._idx_path, f"sequence {i}", False, "whole tokens inside the .bin", actual)
    if not 0 <= offset <= offset + length <= size:
        part = f"offset {offset} with length {length} is out of range"
        raise IndexError(f"{pair.path_prefix}: {part}: sequence {i} has {size} tokens")


def _as_lengths_and_modes(builder, content, lengths, modes):
    """Return lengths as an int32 array and modes as an int8 array, as the .idx stores them.

    Raises ValueError if a value does not fit, or if a length is negative.  Also raises it if the
    sum of the lengths is not the number of tokens in content, or if there is not one mode for each
    length.
    """
    path = builder._bin.path
    try:
        lengths = array.array("i", iter(lengths))  # array("i", bytes) would copy their memory
    except OverflowError:
        raise ValueError(f"{path}: lengths must fit int32, got {lengths!s:.60}") from None
    if builder.multimodal:
        try:
            modes = array.array("b", bytes(len(lengths)) if modes is None else modes)
        except OverflowError:
            raise ValueError(f"{path}: modes must fit int8, got {modes!s:.60}") from None
    num_tokens = len(content) // builder._token_dtype.itemsize
    if min(lengths, default=0) < 0:
        raise ValueError(f"{path}: lengths must be at least 0, got {min(lengths)}")
    if sum(lengths) != num_tokens:
        raise ValueError(f"{path}: the lengths sum to {sum(lengths)}, not to {num_tokens} tokens")
    if builder.multimodal and len(modes) != len(lengths):
        raise ValueError(f"{path}: got {len(lengths)} lengths, but {len(modes)} modes")
    return lengths, modes


def _check_appended(builder, other):
    """Raise ValueError if a pair cannot be appended, for one of the reasons in add_index()."""
    source = get_bin_path(other.path_prefix)
    if os.path.realpath(source) == os.path.realpath(builder._bin.path):
        raise ValueError(f"{source} is both input and output; choose a different output prefix")
    if other.dtype != builder.dtype:
        reason = f"got {other.dtype.__name__}; only pairs of one dtype can be merged"
        raise ValueError(f"{source}: expected {builder.dtype.__name__} tokens, {reason}")
    if other.has_modes and not builder.multimodal:
        raise ValueError(f"{source} has modes; keep them with multimodal=True (--multimodal)")


def _check_finished(builder):
    """Raise ValueError if a builder is closed, or has sequences that are in no document yet."""
    path = builder._bin.path
    if not builder._bin.is_open:
        raise ValueError(f"{path}: closed by finalize() or by a failed write; use a new builder")
    last_end = builder.document_indices[-1]
    if last_end != len(builder.sequence_lengths):
        raise ValueError(f"{path}: call end_document(): sequence {last_end} is in no document yet")


def _as_integers(ids, values):
    """Return an array of token ids as integers.  Raises ValueError unless they are integers.

    Decimal strings, which upstream's tests pass, are converted.  The message of the error shows
    values, the ids as the user gave them.
    """
    if ids.dtype.kind == "U":
        ids = np.array([int(text) for text in ids])
    if len(ids) and ids.dtype.kind not in "biu":  # bool, signed, unsigned
        form = "integers of one type, of at most 64 bits"  # numpy makes floats of uint64 and int
        raise ValueError(f"token ids must be {form}, got {values!s:.60}")
    return ids


def _check_ids_fit(ids, tokens):
    """Raise ValueError for the first id that was changed by its conversion to tokens.dtype."""
    misfits = (tokens != ids).nonzero()[0]
    if len(misfits):
        i = misfits[0]
        advice = "choose a larger dtype, or correct the tokenizer's vocab_size, which determines it"
        raise ValueError(f"token id {ids[i]} (index {i}) does not fit {tokens.dtype}; {advice}")


def _check_text(text):
    """Raise ValueError unless a text is a str or a list of str."""
    if isinstance(text, str):
        return
    if not isinstance(text, list) or not all(isinstance(each, str) for each in text):
        raise ValueError(f"expected a text, or a list of sentences, got {text!r:.60}")


def _as_ids(tokenizer, values):
    """Return the result of tokenize() as an array.  Raises ValueError unless it lists integers."""
    ids = np.asarray(values)
    if ids.ndim != 1 or (len(ids) > 0 and ids.dtype.kind not in "iu"):
        name = type(tokenizer).__name__
        raise ValueError(f"expected a list of ids from tokenize() of {name}, got {values!r:.60}")
    return ids


# -- Configs, blends and builds (sections 3, 6 and 7) ----------------------------------------------


def _check_weights(weights, names):
    """Raise ValueError unless each name has a finite weight >= 0, and the sum is finite and > 0."""
    weights = np.array(weights).tolist()  # a single number stays a number
    if not isinstance(weights, list) or len(weights) != len(names):
        raise ValueError(f"weights: expected a list of length {len(names)}, got {weights!r}")
    for weight, name in zip(weights, names, strict=True):
        if not isinstance(weight, numbers.Real) or not 0 <= weight < math.inf:
            raise ValueError(f"weight of {name}: expected a finite number >= 0, got {weight!r}")
    if not 0 < sum(weights) < math.inf:
        raise ValueError(f"weights: expected a finite sum above 0, got {weights}")


def _check_config(config):
    """Raise ValueError if a field that names the data is invalid, or if two fields conflict."""
    _check_no_secrets([config.blend, config.blend_per_split])
    blends = [config.blend]
    if config.blend_per_split is not None:
        blends = config.blend_per_split
        if len(blends) != len(Split):
            raise ValueError(f"blend_per_split: expected 3 entries, got {len(blends)}")
        if config.blend is not None or config.split is not None:
            raise ValueError("with blend_per_split, blend and split must be None")
    elif config.multiple_validation_sets:
        raise ValueError("multiple_validation_sets needs blend_per_split")
    elif config.blend is not None and config.split is None:
        raise ValueError('a blend needs a split, such as "98,1,1"')
    _as_whole(config.num_dataset_builder_threads, "num_dataset_builder_threads", 1)
    for blend in blends:
        if blend is not None:
            _check_blend(blend)
    if config.blend_phases is not None:
        if blends[0] is None:
            raise ValueError("blend_phases needs train corpora: give blend, or blend_per_split[0]")
        _check_phases(config.blend_phases, blends[0][0], "blend_phases")


def _check_blend(blend):
    """Raise ValueError unless a blend is (prefixes, weights or None).

    Messages show only the type of an invalid value, because it could contain a URL with a password.
    """
    form = "blend: expected ([prefix, ...], [weight, ...] or None), got"
    if not isinstance(blend, collections.abc.Sequence) or len(blend) != 2:
        raise ValueError(f"{form} {type(blend).__name__}")
    prefixes, weights = blend
    if not isinstance(prefixes, collections.abc.Sequence) or isinstance(prefixes, (str, bytes)):
        raise ValueError(f"{form} prefixes of type {type(prefixes).__name__}")
    if len(prefixes) == 0:
        raise ValueError(f"{form} no prefix")
    if weights is not None:
        _check_weights(weights, prefixes)


def _check_has_prefix(dataset_path):
    """Raise ValueError if dataset_path is None, as it is if the config describes mock data."""
    if dataset_path is None:
        raise ValueError("config: no blend is given; give one, or build MockGPTDataset")


def _check_config_of_samples(config):
    """Raise ValueError if fields exclude each other, or if the tokenizer lacks what they need."""
    names = ["unique_identifiers"]
    if config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss:
        names.append("eod")
    _check_tokenizer(config.tokenizer, names)  # section 19
    if config.hybrid_context_parallel:
        raise ValueError("hybrid_context_parallel is not supported; use inter_document_masking")
    if config.reset_attention_mask and not config.has_dense_mask:
        needs = "create_attention_mask=True and inter_document_masking=False"
        raise ValueError(f"reset_attention_mask needs {needs}")


def _is_decimal(text):
    """Return whether a text is a decimal number.  (float() also accepts 2023_01, inf and nan.)"""
    return re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is not None


def _warn_of_ambiguous_pad(pad, same):
    """Warn that the pad id is also the id of other special tokens, and is therefore not used."""
    _warn(
        f"tokenizer: the pad id {pad} is also the id of {' and '.join(same)}, so padding uses -1 "
        "instead.  To silence this warning, give the tokenizer a pad id of its own, or set "
        f"allow_ambiguous_pad_tokens (then no label with the id {pad} has a loss)"
    )


def _check_alternating(is_weight):
    """Raise ValueError unless the entries of a blend are weights and prefixes, in alternation."""
    if len(is_weight) == 0 or is_weight != [True, False] * (len(is_weight) // 2):
        positions = [i for i, each in enumerate(is_weight) if each]
        raise ValueError(
            "blend: expected only prefixes, or weight, prefix, weight, prefix, ..., got "
            f"{len(is_weight)} entries, with numbers at the indices {positions!s:.60}; write a "
            "prefix that is a number as ./2023"
        )


def _check_phases(phases, names, field="phases"):
    """Raise ValueError unless phases are [(samples, weights), ...] with weights for these names."""
    if not isinstance(phases, collections.abc.Sequence) or len(phases) == 0:
        raise ValueError(f"{field}: expected [(samples, weights), ...], got {phases!r:.60}")
    for number, phase in enumerate(phases):
        with _naming_place(f"{field}, phase {number}"):
            if not isinstance(phase, collections.abc.Sequence) or len(phase) != 2:
                raise ValueError(f"expected (samples, weights), got {phase!r:.60}")
            _as_whole(phase[0], "samples", 1)
            _check_weights(phase[1], names)


def _as_normalized_phases(phases, names):
    """Return the phases of a blend as [(samples, normalized weights), ...].

    Weights of 0 are left out of the sum, as in a plain blend, which drops their corpora.  numpy
    might round a sum with zeros differently.
    """
    _check_phases(phases, names)
    normalized = []
    for samples, weights in phases:
        shares = np.array(weights, np.float64)
        is_used = shares > 0
        shares[is_used] = normalize(shares[is_used])
        normalized.append((int(samples), shares.tolist()))
    return normalized


class _BlendTooLarge(ValueError):
    """Datasets are too small for a blend.

    The attribute "needed" maps each dataset that is too small to the number of samples required.
    """


def _check_blend_fits(datasets, taken):
    """Raise _BlendTooLarge if a blend takes more samples from a dataset than it has."""
    needed = {}
    for part, count in zip(datasets, taken, strict=True):
        if count > len(part):
            needed[part] = max(count, needed.get(part, 0))  # a part may be in the blend twice
    if needed:
        part, count = next(iter(needed.items()))
        taken = f"{count:,} samples from {_label_of_dataset(part)}, which has {len(part):,}"
        error = _BlendTooLarge(f"the blend takes {taken}; use larger datasets, or other weights")
        error.needed = needed
        raise error


def _check_sizes(config, sizes):
    """Raise ValueError unless there are 3 sizes, and train's is not above the samples of phases."""
    if len(sizes) != len(Split):
        raise ValueError(f"sizes: expected 3 (train, valid, test), got {len(sizes)}")
    train, _, _ = sizes
    if config.blend_phases is not None and train is not None:
        total = sum(operator.index(samples) for samples, _ in config.blend_phases)
        if train > total:
            raise ValueError(f"train needs {train} samples, blend_phases has {total}; add a phase")


def _check_size_of_sets(config, prefixes, size):
    """Raise ValueError if several validation sets with full_validation have a size."""
    if config.full_validation and len(prefixes) > 1 and size is not None:
        raise ValueError(f"with full_validation, the size of valid must be None, got {size}")


def _warn_of_few_samples(split, total, size):
    """Warn if size, the samples requested from a split, is above total, the samples that it has."""
    if size is not None and size > total:
        has = f"only {total:,}; request fewer, or give weights, so that corpora are read repeatedly"
        if total == 0:
            has = "none; add corpora to it, or give it a larger share in split"
        _warn(f"{size:,} samples are requested from {split.name}, which has {has}")


def _check_has_size(split, size):
    """Raise ValueError if a blend with weights has the size None."""
    if size is None:
        advice = "give a number, or leave out the weights to read each corpus once"
        raise ValueError(f"{split.name}: the size of a blend with weights is None; {advice}")


def _warn_of_short_corpora(split, size, datasets):
    """Warn if corpora of a split are shorter than a sample, or if no corpus has a sample.

    datasets are those of the corpora.  A corpus without tokens in this split does not count as
    short.  If size is 0, nobody requested a sample, so there is no warning.
    """
    if size == 0:
        return
    short = []
    for dataset in datasets:
        if isinstance(dataset, GPTDataset) and len(dataset) == 0 and dataset.num_samples is None:
            tokens = _count_tokens(dataset.dataset.sequence_lengths, dataset._documents)
            needed = dataset._x + (1 if dataset._keeps_short else dataset.config.sequence_length)
            if 0 < tokens < needed:
                label = _label_of_dataset(dataset)
                short.append(f"{label} has {tokens} of {needed} needed tokens")
    if short:
        advice = "add documents, enlarge the share of the split, or reduce sequence_length"
        number = f"{len(short)} of {len(datasets)} corpora cannot fill one sample"
        _warn(f"{split.name}: {number} (for example, {short[0]}); {advice}")
    elif not any(len(dataset) for dataset in datasets):
        _warn_of_few_samples(split, 0, size)


def _check_corpora(opened, cls, tokenizer):
    """Raise ValueError if a corpus has too many sequences, or if the tokenizers of corpora differ.

    opened is {prefix: corpus}.  Warns if the config has a different tokenizer.
    """
    for prefix, corpus in opened.items():
        n = cls.numel_low_level_dataset(corpus)
        if n >= 2**31:
            advice = "split the corpus into several pairs and blend them"
            raise ValueError(f"{prefix}: {n} sequences, expected at most {2**31 - 1}; {advice}")
    _check_tokenizers(opened, tokenizer)  # section 20


def _check_same_builds(datasets):
    """Raise ValueError on every rank unless all ranks have built the same samples.

    datasets are the datasets of this rank, or None if it has built nothing.  The message names the
    ranks that differ from rank 0, and the first difference.  If the ranks agree, two all_reduces of
    a few bytes are enough; _call_and_wait() makes one of them.
    """
    text = _call_and_wait(functools.partial(_provenance_of_build, datasets))
    ends = torch.full((2,), 2**63 - 1, device=_device_of_group())
    if text is not None:
        digest = int(_md5(text)[:15], 16)
        ends = torch.tensor([digest, -digest], device=_device_of_group())
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MIN)
    if ends[0] == -ends[1]:  # the lowest digest is also the highest
        return
    texts = [None] * _world_size()
    torch.distributed.all_gather_object(texts, text)
    expected = json.loads(texts[0])  # rank 0 always builds
    # None for a rank that has built nothing, or that differs only in labels
    differences = [each and _first_difference(expected, json.loads(each)) for each in texts]
    ranks = [rank for rank, difference in enumerate(differences) if difference]
    if ranks:
        key, *values = differences[ranks[0]]
        difference = f"{key} is {values[0]} on rank 0, and {values[1]} on rank {ranks[0]}"
        advice = "give all nodes the same copy of the corpora and the same config"
        raise ValueError(f"ranks {ranks} built different data from rank 0 ({difference}); {advice}")


def _provenance_of_build(datasets):
    """Return what determines the samples of all datasets (section 10) as JSON; None for None."""
    if datasets is None:
        return None
    provenance = {}
    for split, built in zip(Split, datasets, strict=True):
        if isinstance(built, list):  # several validation sets
            for number, dataset in enumerate(built):
                provenance[f"{split.name} {number}"] = _provenance_of(dataset, None, {})
        elif built is not None:
            provenance[split.name] = _provenance_of(built, None, {})
    return json.dumps(provenance, default=_json_default)


# -- Kernels, index arrays and samples (sections 4 to 6) -------------------------------------------


def _check_array(values, name, dtype):
    """Raise TypeError unless values is an array of this dtype, and ValueError unless it is 1-D."""
    if not isinstance(values, np.ndarray) or values.dtype != dtype:
        kind = getattr(values, "dtype", type(values).__name__)
        raise TypeError(f"{name} must be an array of {np.dtype(dtype)}, got {kind}")
    if values.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {values.shape}")


def _as_document_numbers(documents):
    """Return documents as int32.  Raises ValueError for a number that does not fit."""
    documents = np.asarray(documents)
    if len(documents):
        for number in np.array([documents.min(), documents.max()]).tolist():
            _as_whole(number, "document", 0, 2**31 - 1)
    return documents.astype(np.int32, copy=False)


def _check_has_tokens(tokens_per_epoch, num_samples, unit="tokens"):
    """Raise ValueError if samples are requested, but an epoch has no tokens (or no rows)."""
    if tokens_per_epoch == 0:
        advice = "give the split a larger share, use a larger corpus, or request no samples"
        raise ValueError(f"num_samples is {num_samples}, but there are no {unit}; {advice}")


def _check_document_index(document_index, sizes):
    """Raise IndexError unless each document is an index into sizes."""
    n = len(sizes)
    wrong = np.flatnonzero((document_index < 0) | (document_index >= n))
    if len(wrong):
        d = wrong[0]
        raise IndexError(f"document_indices[{d}] is {document_index[d]}; there are {n} sequences")


def _check_lengths(lengths, num_tokens):
    """Raise ValueError if a length is negative, or if the sum is below num_tokens."""
    if lengths.min(initial=0) < 0:
        d = lengths.argmin()
        raise ValueError(f"sizes: document {d} of the stream has a negative length, {lengths[d]}")
    total = lengths.sum(dtype=np.int64)
    if num_tokens > total:
        raise ValueError(f"the samples need {num_tokens} tokens, but the documents have {total}")


def _check_shares(datasets, weights, size, phases):
    """Raise ValueError for datasets of several splits, or for phases with weights or a size."""
    splits = {dataset.index_split.name for dataset in datasets}
    if len(splits) > 1:
        raise ValueError(f"the datasets of a blend must be of one split, got {sorted(splits)}")
    if phases is not None and (weights is not None or size is not None):
        raise ValueError("with phases, weights and size must be None")


def _check_phase_has_weight(samples, weights):
    """Raise ValueError if a phase has samples, but no dataset can give them."""
    if samples and not any(weights):
        raise ValueError(f"weights of a phase: expected a sum above 0, got {weights}")


def _check_blending(dataset_index, dataset_sample_index, shares, num_datasets):
    """Check the arguments of the functions of section 6, whose docstrings list the errors."""
    _check_array(dataset_index, "dataset_index", np.int16)
    _check_array(dataset_sample_index, "dataset_sample_index", np.int64)
    _as_whole(num_datasets, "num_datasets", 1, 2**15 - 2)
    if len(shares) != num_datasets:
        raise ValueError(f"num_datasets is {num_datasets}, but got {len(shares)} weights or sizes")
    if not np.all((shares >= 0) & (shares < np.inf)):
        raise ValueError(f"weights: expected finite numbers >= 0, got {shares!s:.60}")


def _check_corpus(dataset):
    """Check the corpus of a GPTDataset, before its index arrays are built.

    Raises what IndexedDataset.verify() raises.  Warns if a field of the config needs eods, but none
    of the first 16 documents ends with an eod.
    """
    reader = dataset.dataset
    if isinstance(reader, IndexedDataset):
        reader.verify()
    if dataset.eod_token_id is None:
        return
    lengths = reader.sequence_lengths
    documents = [i for i in dataset.indices[:16].tolist() if lengths[i] > 0]
    last_tokens = [reader.get(i, int(lengths[i]) - 1, 1)[0] for i in documents]
    if last_tokens and dataset.eod_token_id not in last_tokens:
        _warn(
            f"{_label_of_dataset(dataset)}: none of the first {len(documents)} documents ends with "
            "an eod, which reset_position_ids, reset_attention_mask and eod_mask_loss need; "
            "preprocess the corpus with append_eod=True (--append-eod)"
        )


def _check_rows_of_sample(dataset, k, j, rows):
    """Raise IndexError unless rows j and j + 1 of sample_index lead to sequences of the corpus.

    Index arrays that were built from different data may point outside the corpus, or hold an index
    below 0, which numpy would count from the end.  The offsets are checked later, when the
    sequences are read.
    """
    sequences = []
    if j >= 0 and len(rows) == 2:
        sequences = dataset.document_index[rows[0][0] : rows[1][0] + 1].tolist()
    is_complete = 0 < len(sequences) == rows[1][0] - rows[0][0] + 1
    n = len(dataset.dataset.sequence_lengths)
    if not is_complete or min(*rows[0], *rows[1], *sequences) < 0 or max(sequences) >= n:
        reason = f"the index arrays do not match the corpus (sample_index, from row {j}: {rows})"
        advice = "delete the cache folder and build the dataset again"
        raise IndexError(f"{_label_of_dataset(dataset)}, sample {k}: {reason}; {advice}")


def _check_sample_fits(dataset, ids):
    """Raise IndexError if a sample has more than S + x tokens."""
    most = dataset.config.sequence_length + dataset._x
    if len(ids) > most:
        size = f"a sample has {len(ids)} tokens, expected at most {most}"
        advice = "correct the subclass that made it, or delete the cache folder and build again"
        raise IndexError(f"{_label_of_dataset(dataset)}: {size}; {advice}")


# -- Samplers, batches and gradients (sections 8 to 12) --------------------------------------------


def _check_start(sampler, consumed_samples):
    """Raise ValueError if a size of a sampler is invalid, or it cannot start at consumed_samples.

    "cyclic" needs samples for at least one full round, and starts after any number of full rounds.
    The other samplers start anywhere in the pass, or at its end.
    """
    total = sampler.total_samples
    is_cyclic = sampler.kind == "cyclic"
    for name in ("total_samples", "micro_batch_size", "data_parallel_size"):
        _as_whole(getattr(sampler, name), name, 1)
    _as_whole(sampler.data_parallel_rank, "data_parallel_rank", 0, sampler.data_parallel_size - 1)
    _as_whole(consumed_samples, "consumed_samples")
    if consumed_samples > total and not is_cyclic:
        reason = f"the dataset has {total} samples, but the run is at sample {consumed_samples}"
        advice = "request as many samples as the saved run did"
        raise ValueError(f"consumed_samples: {reason}; {advice}")
    size = f"{sampler.samples_per_round} (micro_batch_size * data_parallel_size)"
    if is_cyclic and total < sampler.samples_per_round:
        advice = "request more samples, or make one of the two sizes smaller"
        raise ValueError(f"total_samples: expected at least {size}, got {total}; {advice}")
    if is_cyclic and consumed_samples % sampler.samples_per_round:
        advice = f"choose the two sizes so that their product divides {consumed_samples}"
        got = f"got {consumed_samples}; {advice}"
        raise ValueError(f"consumed_samples: expected a multiple of {size}, {got}")


def _check_parallel_sizes(world_size, tensor, context, pipeline):
    """Raise ValueError unless the sizes fit world_size, and torch.distributed is initialized."""
    if world_size > 1 and not _is_distributed():
        why = "torch.distributed is not initialized, so all processes would read the same data"
        raise ValueError(f"WORLD_SIZE is {world_size}, but {why}; call init_process_group() first")
    if min(tensor, context, pipeline) < 1 or world_size % (tensor * context * pipeline):
        axes = f"tensor {tensor} x context {context} x pipeline {pipeline}"
        raise ValueError(f"{axes}: the product must divide {world_size}, the number of ranks")


def _check_axes(kind, axes):
    """Raise ValueError if one of the axes, the parts of kind, is unknown."""
    if not {"tp", "cp", "dp", "pp"}.issuperset(axes):
        raise ValueError(f"kind {kind!r}: expected tp, cp, dp or pp, or several joined by '-'")


def _check_batch(batch, layout, create_attention_mask):
    """Raise ValueError unless a batch has the tensors of a layout, {key: (shape, dtype)}.

    Floating-point tensors are rejected if integers are expected.  A packed batch is accepted only
    for a packed layout, and vice versa.  Also raises ValueError if get_batch() would drop a mask
    that keeps documents apart.
    """
    packed = "cu_seqlens" in layout
    if packed != (batch.get("cu_seqlens") is not None):
        has = "has no cu_seqlens" if packed else "has cu_seqlens"
        raise ValueError(f"packed={packed}, but this batch {has}; pass packed={not packed}")
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and not create_attention_mask:
        tokens = mask.shape[-1]
        if mask.shape[1:] == (1, tokens, tokens):
            hidden_from_last = mask[:, 0, -1]
            # the last token may not attend to the first, though it may to itself
            if (hidden_from_last[:, 0] & ~hidden_from_last[:, -1]).any():
                loss = "would be dropped; pass create_attention_mask=True, or batches without it"
                raise ValueError(f"the attention_mask keeps documents apart, but {loss}")
    for key, (shape, dtype) in layout.items():
        given = batch.get(key)
        if getattr(given, "shape", None) != shape:
            given = tuple(given.shape) if isinstance(given, torch.Tensor) else given
            raise ValueError(
                f"batch[{key!r}]: expected shape {shape}, got {given!s:.60}; give config, loader "
                "and get_batch() the same sequence_length, micro_batch_size, create_attention_mask"
            )
        if given.is_floating_point() and not dtype.is_floating_point:
            raise ValueError(f"batch[{key!r}]: expected {dtype}, got {given.dtype}")


def _check_batch_to_cut(batch):
    """Raise ValueError if a _BATCH_KEYS value is not a tensor, or if only other keys have values.

    None counts as no value.  So a batch whose values are all None, as in a pipeline stage that
    reads nothing, is accepted.
    """
    given = {key for key, value in batch.items() if value is not None}
    for key in _BATCH_KEYS:
        if key in given and not isinstance(batch[key], torch.Tensor):
            raise ValueError(f"batch[{key!r}]: expected a tensor, got {type(batch[key]).__name__}")
    others = sorted(given - {"dataset_id", "max_seqlen"}, key=str)
    if others and given.isdisjoint([*_BATCH_KEYS, "cu_seqlens"]):
        reason = f"none of {', '.join(_BATCH_KEYS)} is given, so the row length is unknown"
        raise ValueError(f'batch: {reason} (keys: {others}); rename the token tensor to "tokens"')


def _check_axis_to_cut(key, value, dim, length):
    """Raise ValueError if a tensor of _BATCH_KEYS has neither length nor 1 entries along dim.

    A length of 1 is accepted, for example in a mask that is the same for all queries.
    """
    if key in _BATCH_KEYS and value.shape[dim : dim + 1] not in ((length,), (1,)):
        rows = f"expected {length} tokens along dim {dim}, got shape {tuple(value.shape)}"
        raise ValueError(f"batch[{key!r}]: {rows}; give all tensors rows of the same length")


def _check_rows_to_cut(key, value, positions):
    """Raise ValueError unless a tensor of a batch has as many rows as cu_seqlens."""
    if len(value) != len(positions):
        rows = f"{len(value)} rows, but cu_seqlens has {len(positions)}"
        raise ValueError(f"batch[{key!r}] has {rows}; give all tensors the same number of rows")


def _check_divisible_row(length, cp_size):
    """Raise ValueError unless rows of this length can be cut into 2 * cp_size equal chunks."""
    if length % (2 * cp_size):
        expected = f"a multiple of {2 * cp_size} (2 * cp_size); change sequence_length"
        raise ValueError(f"batch: its rows have {length} tokens, expected {expected}")


def _as_bounds(cu_seqlens, S):
    """Return cu_seqlens as int64 on the CPU, with an added 0 in front and an added S at the end.

    A cu_seqlens from elsewhere may lack them.  If it has them, this adds only empty documents.
    """
    bounds = torch.nn.functional.pad(cu_seqlens.to("cpu", torch.int64), (1, 0))
    return torch.nn.functional.pad(bounds, (0, 1), value=S)


def _check_divisible_documents(bounds, cp_size):
    """Raise ValueError unless each document can be cut into 2 * cp_size equal chunks.

    bounds   int64 (rows, n): two successive bounds in a row enclose a document, or no tokens
    """
    lengths = bounds.diff(dim=1)
    wrong = ((lengths < 0) | (lengths % (2 * cp_size) != 0)).nonzero()
    if len(wrong):
        row, i = wrong[0].tolist()
        begin, end = bounds[row, i : i + 2].tolist()
        number = int((lengths[row, :i] > 0).sum())
        raise ValueError(
            f"batch: document {number} of row {row} has {end - begin} tokens ({begin} to {end} in "
            f"cu_seqlens), expected a multiple of {2 * cp_size} (2 * cp_size); pad the documents, "
            "or cut full rows with use_per_sequence_balancing=True"
        )


def _check_loader(sampler, kwargs):
    """Raise ValueError for in_order=False, and warn if a loader would have no batch."""
    if not kwargs.get("in_order", True):
        raise ValueError("in_order=False is not supported, because a state counts batches in order")
    if len(sampler) == 0:
        sizes = f"{sampler.total_samples} samples, and a round has {sampler.samples_per_round}"
        advice = "request more samples, or set drop_last=False"
        _warn(f"the loader has no batch: the dataset has {sizes}; {advice}")


def _check_iterator(loader, iterator):
    """Raise RuntimeError if an iterator of a loader is outdated."""
    if loader._is_loaded:
        raise RuntimeError("load_state_dict() was called; use a new iterator, iter(loader)")
    if loader.persistent_workers and loader._current_iterator is not iterator:
        raise RuntimeError("persistent_workers: a newer iterator has begun; use only the newest")


def _check_data_of_loader(dataset, rank, size):
    """Raise ValueError for several datasets, or if several processes lack the rank or the size."""
    if isinstance(dataset, (list, tuple)) and isinstance(dataset[0], torch.utils.data.Dataset):
        raise ValueError(f"dataset: got {len(dataset)} datasets; build one loader for each")
    if _num_processes() > 1 and (rank is None or size is None):
        needs = f"{_num_processes()} processes need data_parallel_rank and data_parallel_size"
        raise ValueError(f"{needs}; if all should read the same samples, pass 0 and 1")


def _check_gradient_in_time(ddp, param):
    """Raise RuntimeError if a gradient is too late for the average of its step.

    It is too late if its bucket has been sent or, with grad_reduce_in_fp32, if finish_grad_sync()
    has ended the step.
    """
    if ddp._bucket_of[param] < ddp._num_sent:
        raise RuntimeError(
            f"a gradient of {ddp._names[param]} arrived after its bucket was sent; set "
            "overlap_grad_reduce=False, or run all backward passes of a step but the last under "
            "no_sync() and use activation checkpoints with use_reentrant=False"
        )
    if ddp._grads_are_averaged and ddp.grad_reduce_in_fp32:
        event = f"a gradient of {ddp._names[param]} arrived after finish_grad_sync()"
        raise RuntimeError(f"{event}; call zero_grad_buffer() before each step")


def _check_parameters(ddp):
    """Raise ValueError if a parameter of the wrapped model was replaced, frozen or unfrozen.

    A frozen parameter would still have a gradient (of zeros), and an optimizer with momentum or
    weight decay could change it.  The gradient of a new or unfrozen parameter is not averaged.
    """
    for name, param in ddp.module.named_parameters():
        if param.requires_grad != (param in ddp._slices):
            change = "replaced or unfrozen" if param.requires_grad else "frozen"
            advice = "make this change before wrapping the model"
            raise ValueError(f"{name} was {change} after the model was wrapped; {advice}")


def _check_loss_is_mean(model):
    """Raise ValueError if torch averages the gradients of this model over ranks.

    Called when the loss is a sum over tokens.  Torch would average these sums over the ranks, and
    each rank would then divide by its own token count instead of the total.
    """
    if _num_processes() == 1:
        return
    # The classes are found by name, because torch.distributed.fsdp is slow to import.
    averaging = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    for part in model.modules():
        for kind in type(part).__mro__:
            if kind.__name__ in averaging and kind.__module__.startswith("torch."):
                raise ValueError(
                    f"torch's {kind.__name__} averages gradients over ranks, so a sum of losses "
                    "would be divided by the tokens of this rank only; have loss_func return "
                    "(mean loss, report), or wrap the model in megatron_min's "
                    "DistributedDataParallel instead"
                )


def _check_rampup(sizes, global_batch_size, samples_per_round):
    """Raise ValueError unless sizes, a range, leads to global_batch_size in full rounds."""
    if global_batch_size not in sizes:
        ramp = f"increments of {sizes.step} from {sizes.start}"
        raise ValueError(f"rampup_batch_size: {ramp} do not reach {global_batch_size}")
    for size in sizes:
        if min(size, samples_per_round) < 1 or size % samples_per_round:
            factor = f"{samples_per_round} (micro_batch_size * data_parallel_size)"
            raise ValueError(f"a global batch of {size}: expected a positive multiple of {factor}")


# -- Small helpers of all sections, which check nothing --------------------------------------------


def _label_of_dataset(dataset):
    """Return what messages call a dataset: its path, or its class if it has no path."""
    path = getattr(dataset, "dataset_path", None)
    return type(dataset).__name__ if path is None else str(path)


def _label_of_epochs(dataset):
    """Return what repr() says about the epochs of a dataset; "" if it has no epoch_plan."""
    plan = getattr(dataset, "epoch_plan", None)
    return "" if plan is None else f", epochs={plan.num_epochs}"


def _ceil_div(a, b):
    """Return the smallest integer that is at least a / b, in exact integers."""
    return -(-a // b)


def _md5(data):
    """Return the MD5 of a str or bytes in hex, for names and comparisons; it protects nothing."""
    if isinstance(data, str):
        data = data.encode()
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _import_extra(module, user):
    """Import a module of an optional package.  An ImportError names user, which needs it."""
    package = module.partition(".")[0]
    failure = f"needs the package {package} (pip install {package})"
    with _naming_failure(user, failure, ImportError):
        return importlib.import_module(module)


def _is_remote(path):
    """Return whether a path is a URL, such as s3://bucket/corpus or simplecache::s3://b/corpus."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.:-]*://", os.fsdecode(path)) is not None


def _absolute_path(path):
    """Return a path as an absolute path, and a URL unchanged.

    The path is not normalized, because only the system knows what link/.. is if link is a symbolic
    link.
    """
    path = os.fsdecode(path)
    return path if _is_remote(path) or os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _allow_open_files():
    """Raise the limit on open files of this process to the maximum that the system allows."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _is_distributed():
    """Return whether this process is a rank of a torch.distributed job."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank(group=None):
    """Return this process's rank in a group, by default in the whole job; 0 without a job."""
    return torch.distributed.get_rank(group) if _is_distributed() else 0


def _world_size(group=None):
    """Return the number of ranks in a group, by default in the whole job; 1 without a job."""
    return torch.distributed.get_world_size(group) if _is_distributed() else 1


def _num_processes():
    """Return the number of processes, from torch.distributed or else from WORLD_SIZE."""
    return _world_size() if _is_distributed() else int(os.environ.get("WORLD_SIZE") or 1)


# ==============================================================================
# 14. Complete files
# ==============================================================================
# Question: how does a file appear complete, or not at all?
#
#   write    corpus.bin.1f0c9e2ab47d6835.tmp   a new file beside the old one, with a random part
#   sync     the same file                     the operating system writes it to the disk
#   rename   corpus.bin                        one step: a reader finds the old or the new file
#
# A pair has two names, and no single step can rename both files.  In the steps below, an .idx is
# never beside the .bin of a different pair.  Therefore, if a reader finds the same .idx before and
# after opening the .bin, the two files belong together.  X is the random part:
#
#   step   corpus.bin   corpus.idx   corpus.bin.X.tmp   corpus.idx.X.tmp
#   0      old          old          new                new                 both are synced
#   1      old                       new                new                 .idx and record deleted
#   2      new                                          new
#   3      new          new                                                 the folder is synced
#
# If the job ends before step 1, the old pair stays.  (Without an old .idx, this holds until step
# 2.)  If the job ends later, because of an error or any signal, the new pair is complete.  However,
# both files or only the .idx may still have temporary names.  An OSError names the two files.
# Rename them yourself, the .bin first.
#
# All other temporary files are removed, at the latest when the process ends.  After SIGKILL, delete
# these files yourself.


class _NewFile(contextlib.AbstractContextManager):
    """A binary file that is renamed to its final name when complete, at the end of a with block.

    path       its final name, made absolute, because the working directory may change meanwhile
    synced     True: the content is on the disk before the file is renamed to its final name.
               False: the file can be made again, so it need not wait for the disk
    random_part
               a part of the temporary name.  "": a new one

    The file is removed if a write fails, if an exception ends the block, or if this object is
    deleted.  A fork of the process does not remove it.  An OSError names the file.
    """

    def __init__(self, path: str | os.PathLike, synced: bool = True, random_part: str = "") -> None:
        _check_no_secrets(path)
        self.path = _absolute_path(path)
        self.synced = synced
        self.random_part = random_part or secrets.token_hex(8)
        self.temporary = f"{self.path}.{self.random_part}.tmp"
        # This comes before open(), because a signal may arrive at any moment.
        self._remove = weakref.finalize(self, _remove_path, self.temporary, os.getpid())
        try:
            with _naming_failure(path, f"cannot make a file in {os.path.dirname(self.path)}"):
                self.file = open(self.temporary, "xb", 1 << 20)
        except FileExistsError:  # e.g. the path of the .bin was given as that of the .idx
            self._remove.detach()
            raise
        except BaseException:  # on a network disk, an open() that fails may have created the file
            self._remove()
            raise
        weakref.finalize(self, self.file.raw.close)  # in case nobody closes the file

    def partner(self, path: str | os.PathLike) -> "_NewFile":
        """Return a new file whose temporary name has the same random part."""
        return _NewFile(path, self.synced, self.random_part)

    @property
    def is_open(self) -> bool:
        """Return whether the file has been neither removed nor committed (see _commit_pair())."""
        return self._remove.alive

    def write(self, content: typing.Any) -> None:
        """Write bytes, or the bytes of an array."""
        try:
            self.file.write(content)
        except BaseException:
            self.discard()  # the file may have a part of the content
            # Entering this block costs 1 us, so it is entered only after an error.
            with _naming_failure(self.temporary, "cannot be written"):
                raise

    def finish(self) -> None:
        """Close the complete file, which keeps its temporary name.  A second call does nothing."""
        if self.file.closed:
            return
        try:
            with _naming_failure(self.temporary, "cannot be written"):
                self.file.flush()
                if self.synced:
                    os.fsync(self.file.fileno())
                self.file.close()
        except BaseException:
            self.discard()  # after a failed fsync(), a second one may report success
            raise

    def discard(self) -> None:
        """Close the file, and remove it unless it has already been renamed."""
        with contextlib.suppress(OSError):
            self.file.raw.close()  # discards what is still in the buffer
        if self.is_open:  # if a signal interrupts this, the file is removed when the process ends
            _, _, arguments, _ = self._remove.peek()
            _remove_path(*arguments)
            self._remove.detach()

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self.finish()
                os.replace(self.temporary, self.path)
        finally:
            self.discard()


def _temporary_folder():
    """Make a temporary folder, which is removed when the process ends, and return its path."""
    folder = tempfile.mkdtemp()
    # The pid is passed so that a forked process does not remove the folder when it ends.
    atexit.register(_remove_path, folder, os.getpid())
    return folder


def _remove_path(path, pid):
    """Remove a file or a folder, if it exists and pid is the id of this process."""
    if pid == os.getpid():
        with contextlib.suppress(OSError):  # it does not exist, or cannot be removed
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


def _commit_pair(tokens, idx_file):
    """Rename a .bin and its .idx, two objects of _NewFile, in the steps drawn above."""
    tokens.finish()
    idx_file.finish()
    for file in (tokens, idx_file):
        os.stat(file.temporary)  # raises if somebody removed it, while the old pair is still there
    had_old_idx = _exists(idx_file.path)
    try:
        tokens._remove.detach()  # from now on, discard() only closes the file
        idx_file._remove.detach()
        pathlib.Path(f"{idx_file.path.removesuffix('.idx')}.record.json").unlink(missing_ok=True)
        pathlib.Path(idx_file.path).unlink(missing_ok=True)
        os.replace(tokens.temporary, tokens.path)
        os.replace(idx_file.temporary, idx_file.path)
        for folder in {os.path.dirname(tokens.path), os.path.dirname(idx_file.path)}:
            _sync_folder(folder)
    except BaseException:
        # On a network disk, a step that reports failure may still have taken effect.
        bin_is_temporary = _exists(tokens.temporary)
        if bin_is_temporary and had_old_idx == _exists(idx_file.path):
            _remove_path(idx_file.temporary, os.getpid())
            _remove_path(tokens.temporary, os.getpid())
            raise
        names = [tokens.temporary if bin_is_temporary else tokens.path]
        names.append(idx_file.temporary if _exists(idx_file.temporary) else idx_file.path)
        state = "the new pair is complete in these two files"
        advice = f"rename each to its name without .{idx_file.random_part}.tmp, the .bin first"
        with _naming_failure(" and ".join(names), f"{state}; {advice}"):
            raise


def _exists(path):
    """Return whether a name exists.  Raises OSError if this cannot be determined."""
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)
        return True
    return False


def _sync_folder(folder):
    """Flush the directory entries of a folder to disk, if the file system supports this."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):  # the disk failed or is full
            raise


# ==============================================================================
# 15. The index cache
# ==============================================================================
# Question: when can index arrays from an earlier job be used again?
#
# The first job that needs an index array builds and saves it; later jobs load it.  A saved array is
# valid if the same thing was requested and the data are the same.  Three values decide this:
#
#   description   What was requested: upstream's text of the settings, plus our own settings that
#                 differ from their defaults.  The MD5 of this text is in every file name.
#   stamp         The size of a file and the time of its last change (on object storage, a version
#                 such as the ETag).  If the stamp is the same, the file counts as unchanged.
#   fingerprint   The sizes of both files of the pair, and checksums of the sequence lengths and of
#                 both ends of the .bin.  It is the same for every copy of the pair.  It does not
#                 notice an edit in the middle of the .bin that keeps the size.
#
# A stamp is cheap, but a fingerprint reads all sequence lengths.  So manifests and pickled datasets
# hold the identity of a pair: both stamps and the fingerprint.  While the stamps are the same, the
# saved fingerprint is trusted.  Otherwise the whole .idx is verified, and the fingerprint is
# computed again and compared.
#
# These are the files of one dataset, in the cache folder:
#
#   <hash>-GPTDataset-train-description.txt      what was requested
#   <hash>-GPTDataset-train-document_index.npy   the arrays; likewise -sample_index.npy and
#                                                -shuffle_index.npy
#   <hash>-GPTDataset-train-manifest.json        written last.  Its keys:
#       format      version of this layout
#       made_from   everything else that determines the arrays, such as the documents of the split
#       pair        identity of the pair, or null for a blend and for a user's own reader
#       facts       the epoch plan, or how many samples a blend takes from each dataset
#       files       dtype, shape, size and CRC-32 of each array; above 1 MiB, also the modification
#                   time of its file
#       crc32       CRC-32 of the rest of the manifest
#
#   What a job finds                           What it does
#   a manifest for the same data               loads the arrays; memory-maps files over 64 KiB
#   no manifest, or one in another format      builds and saves.  (Upstream wrote the cache, or an
#                                              earlier job was interrupted.)
#   an array over 1 MiB with a different time  builds and saves.  (Another job wrote it, or it was
#                                              copied without its modification time.)
#   a damaged file, or one for other data      builds and saves, and warns why
#   a folder that it cannot write to           builds, keeps the arrays in memory, and warns
#
# An array file over 1 MiB is not read in full: only its size, its time and its first and last 4,096
# bytes are compared with the manifest.  It is synced to disk before it is renamed to its final
# name, so a power failure cannot leave a hole in it.

_CACHE_FORMAT = 7  # increment if the same manifest could now describe different arrays
_FULL_CHECK_LIMIT = 1 << 20  # array files up to this size are read and checked in full


def _load_or_build(dataset, split, made_from, pair):
    """Return (facts, arrays): load the index arrays of a dataset, or build and save them.

    made_from   a flat dict that json can write (see above)
    pair        the IndexedDataset that the arrays are made from, or None

    dataset._build_arrays() builds facts and arrays; its errors are passed on.  If the arrays are in
    files, dataset._arrays_in_files becomes {name: array}.
    """
    if not dataset._cache_folder:
        return dataset._build_arrays()
    if _is_remote(dataset._cache_folder):
        raise ValueError("path_to_cache must be a local folder, got a URL")
    name = f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split.name}"
    stem = os.path.join(dataset._cache_folder, name)  # each file's path begins with it
    in_files = {}
    try:
        facts, in_files = _read_arrays(stem, made_from, pair)
    except Exception as error:
        _warn(f"the index cache {stem}-* cannot be used and is rebuilt: {_message_of(error)}")
    if not in_files:
        facts, arrays = dataset._build_arrays()
        identity = None if pair is None else _identity_of_pair(pair)
        manifest = dict(format=_CACHE_FORMAT, made_from=made_from, pair=identity, facts=facts)
        try:
            in_files = _write_arrays(stem, dataset, arrays, manifest)
        except OSError as error:
            advice = "to save its arrays, set path_to_cache to a folder that can be written"
            _warn(f"the index cache {stem}-* cannot be written: {error}; {advice}")
            return facts, arrays
    dataset._arrays_in_files = in_files
    return facts, list(in_files.values())


def _read_arrays(stem, made_from, pair):
    """Return (facts, {name: array}) from the cache files, or (None, {}) if there is no cache.

    An array file with a different time, or a manifest in a different format, counts as a missing
    cache.  An error is raised if a file is damaged, or made from different data.
    """
    path = pathlib.Path(f"{stem}-manifest.json")
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None, {}
    with _naming_place("manifest.json"):
        manifest = json.loads(text)
    if manifest.get("format") != _CACHE_FORMAT:
        return None, {}
    if manifest.pop("crc32") != zlib.crc32(json.dumps(manifest).encode()):
        raise DatasetFormatError("manifest.json is damaged (its CRC-32 differs)")
    _check_equal(manifest["made_from"], made_from, "it was made from different data")
    if pair is not None:
        _check_identity(pair, manifest["pair"], "the corpus has changed")
    in_files = {}
    for name, entry in manifest["files"].items():
        content, mtime_ns = _read_or_map_file(f"{stem}-{name}.npy")
        problem = f"{name}.npy is not the file that was saved"
        _check_equal(entry, entry | _size_and_crc32(content), problem)
        saved = entry.get("mtime_ns", mtime_ns)
        if mtime_ns not in (saved, saved - saved % 10**9):  # tar keeps only whole seconds
            return None, {}
        in_files[name] = _as_array(content, entry)
    # While the arrays were opened, another job may have replaced some of them.  A job that writes
    # removes the manifest before it renames an array.
    if path.read_bytes() != text:
        raise DatasetFormatError("another job rewrote it while it was being read")
    return manifest["facts"], in_files


def _read_or_map_file(path: str | os.PathLike) -> tuple[np.ndarray, int]:
    """Return the bytes of an .idx or array file, read-only, and its modification time in ns.

    Files of at most 64 KiB are read, because each mapping holds a file descriptor, and hundreds of
    corpora would need too many.  A file that the system cannot map is read, too.  Bytes and time
    come from the same file, even if another job replaces it meanwhile.
    """
    with _naming_failure(path, "cannot be read", OSError), open(path, "rb") as file:
        content = None
        if os.path.getsize(path) > 64 << 10:
            with contextlib.suppress(Exception):
                content = np.asarray(np.memmap(file, np.uint8, "r"))
        if content is None:
            file.seek(0)
            content = np.frombuffer(file.read(), np.uint8)
        return content, os.fstat(file.fileno()).st_mtime_ns


def _as_array(content, entry):
    """Return the array in the bytes of an .npy file, which ends with the array's values.

    The manifest's entry has its dtype and shape, so no header is parsed.  For hundreds of small
    files, parsing would take a fifth of the startup time.
    """
    dtype = np.dtype(entry["dtype"])
    header_bytes = len(content) - math.prod(entry["shape"]) * dtype.itemsize
    return np.frombuffer(content, dtype, offset=header_bytes).reshape(entry["shape"])


def _size_and_crc32(content):
    """Return the size of an array file and the CRC-32 of its bytes or, above 1 MiB, of its ends."""
    size = len(content)
    if size > _FULL_CHECK_LIMIT:
        content = np.concatenate([content[:4096], content[-4096:]])
    return {"size": size, "crc32": zlib.crc32(content)}


def _write_arrays(stem, dataset, arrays, manifest):
    """Write the cache files.  Return {name: array}, opened from the files as a later job does.

    The old manifest and description are removed first, and their replacements are put in place
    last.  So a crash cannot leave either of them beside a mixture of old and new arrays.  (Upstream
    trusts arrays that have a description.)
    """
    os.makedirs(os.path.dirname(stem), exist_ok=True)
    in_files = {}
    manifest["files"] = {}
    with contextlib.ExitStack() as new_files:  # its end renames the files
        for name, values in zip(dataset.index_names, arrays, strict=True):
            new_file = new_files.enter_context(_NewFile(f"{stem}-{name}.npy"))
            np.save(new_file, values)
            new_file.synced = new_file.file.tell() > _FULL_CHECK_LIMIT
            new_file.finish()
            # Open the temporary name, because another job may write to the final name meanwhile.
            content, mtime_ns = _read_or_map_file(new_file.temporary)
            entry = {"dtype": values.dtype.str, "shape": values.shape} | _size_and_crc32(content)
            if entry["size"] > _FULL_CHECK_LIMIT:
                entry["mtime_ns"] = mtime_ns  # a rename keeps this time
            manifest["files"][name] = entry
            in_files[name] = _as_array(content, entry)
        for ending in ("manifest.json", "description.txt"):
            pathlib.Path(f"{stem}-{ending}").unlink(missing_ok=True)
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    texts = {"description.txt": dataset.unique_description, "manifest.json": json.dumps(manifest)}
    for ending, text in texts.items():
        with _NewFile(f"{stem}-{ending}", synced=False) as file:
            file.write(text.encode())
    return in_files


# -- Are these the same data? ------------------------------------------------------------------


def _file_stamp(path: str | os.PathLike) -> dict:
    """Return the stamp of a file.  Raises FileNotFoundError if it is missing."""
    if _is_remote(path):
        return _RemoteFile(path).stamp()
    stat = os.stat(path)
    # A program that unpacks or copies a file may set an old st_mtime_ns, but not st_ctime_ns.
    return {"size": stat.st_size, "changed": max(stat.st_mtime_ns, stat.st_ctime_ns)}


def _file_exists(path):
    """Return whether a file exists.  Raises OSError if this cannot be determined."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return bool(_file_stamp(path))
    return False


def _read_idx(pair):
    """Return the bytes of the .idx, as an array; on object storage, they are copied first.

    The stamp of the file is taken before it is read.
    """
    pair._stamps["idx"] = _stamp_of_pair_file(pair._idx_path)
    path = pair._idx_path
    if _is_remote(path):
        path = _fetch_idx(path, pair._stamps["idx"], pair.object_storage_config)
    return _read_or_map_file(path)[0]


def _open_tokens(pair):
    """Open the .bin: return an object that reads it, and the number of its tokens.

    Checks that the .bin ends where the arrays say, and that neither file has changed.  A .bin on
    object storage is not opened and not checked for changes.
    """
    pair._stamps["bin"] = _stamp_of_pair_file(pair._bin_path)
    _check_ends_of_pair(pair)
    if _is_remote(pair._bin_path):
        tokens = _RemoteFile(pair._bin_path, pair.dtype)
    else:
        tokens = (_MappedTokens if pair.mmap else _FileTokens)(pair._bin_path, pair.dtype)
        _check_unchanged(pair._bin_path, pair._stamps["bin"], "opened")
    # If the .idx is unchanged, nobody replaced the pair while it was being opened (section 14).
    _check_unchanged(pair._idx_path, pair._stamps["idx"], "opened")
    return tokens, pair._stamps["bin"]["size"] // pair._token_bytes


def _fingerprint_of_pair(pair):
    """Return the fingerprint of the files of a pair, even if a user has set different arrays."""
    if "fingerprint" not in pair._memo:
        in_files = pair._arrays_in_files
        count = min(4096 // pair._token_bytes, pair.num_tokens)
        ends = in_files["_tokens"].read_many([(0, count), (pair.num_tokens - count, count)])
        pair._memo["fingerprint"] = {
            "idx_size": pair._stamps["idx"]["size"],
            "bin_size": pair._stamps["bin"]["size"],
            "lengths_crc32": zlib.crc32(in_files["sequence_lengths"]),
            "bin_ends_crc32": zlib.crc32(np.concatenate(ends)),
        }
    return pair._memo["fingerprint"]


def _identity_of_pair(pair):
    """Return the identity of a pair: the stamps of both files, and the fingerprint."""
    return {"stamps": pair._stamps, "fingerprint": pair.fingerprint()}


def _check_identity(pair, identity, problem):
    """Raise DatasetFormatError unless a pair has the fingerprint in a saved identity.

    If the stamps are the same, and both have a time, the saved fingerprint becomes the pair's.
    Otherwise the whole .idx is verified, because the fingerprint covers only the lengths in it.
    """
    has_times = all(stamp["changed"] for stamp in pair._stamps.values())
    if has_times and identity["stamps"] == pair._stamps:
        pair._memo["fingerprint"] = identity["fingerprint"]
    else:
        pair.verify()
    _check_equal(identity["fingerprint"], pair.fingerprint(), problem)


def _check_equal(was, now, problem):
    """Raise DatasetFormatError, with the problem and the first difference, if two dicts differ."""
    if was != now:
        raise DatasetFormatError(f"{problem} ({_label_of_difference(was, now)})")


def _lengths_in_use(reader, name):
    """Return {name: CRC-32 of reader.sequence_lengths}, or {} if a fingerprint covers the lengths.

    The fingerprint of a pair covers the lengths in its file, but a user may set different lengths.
    """
    lengths = getattr(reader, "sequence_lengths", [])
    if isinstance(reader, IndexedDataset):
        in_file = reader._arrays_in_files["sequence_lengths"]
        if lengths is in_file or np.array_equal(lengths, in_file):
            return {}
    return {name: zlib.crc32(np.ascontiguousarray(lengths, np.int64))}


# Attributes of an IndexedDataset that its pickle leaves out, because _open() sets them again.
_REOPENED_ATTRIBUTES = (
    "sequence_lengths", "sequence_pointers", "document_indices", "sequence_modes", "_tokens",
    "_stamps", "_memo",
)  # fmt: skip


def _remember_files(pair):
    """Remember the attributes of a pair that have been read from its files."""
    pair._arrays_in_files = {name: getattr(pair, name) for name in _REOPENED_ATTRIBUTES}


def _picklable_state(dataset):
    """Return the attributes of a dataset or a pair, except those that are read from files.

    An array that a user or a subclass has set is not in a file, so it stays in the state.
    """
    state = vars(dataset).copy()
    for name, values in state.pop("_arrays_in_files", {}).items():
        if state.get(name) is values:
            del state[name]
    return state


def _state_of_dataset(dataset):
    """Return what the pickle of a dataset holds: the attributes, without arrays in cache files."""
    state = _picklable_state(dataset)
    if isinstance(dataset, GPTDataset):
        state.pop("indices", None)  # computed from _documents
    return state


def _restore_dataset(dataset, state):
    """Set the attributes of a pickled dataset, and load or build the arrays that it left out.

    A pickle leaves out only arrays that the method of GPTDataset or BlendedDataset has cached.  So
    this method restores them, even if a subclass overrides it.
    """
    vars(dataset).update(state)
    dataset._arrays_in_files = {}
    load_or_build = BlendedDataset._build_indices
    if isinstance(dataset, GPTDataset):
        load_or_build = GPTDataset._build_document_sample_shuffle_indices
    if any(name not in state for name in dataset.index_names):
        for name, values in zip(dataset.index_names, load_or_build(dataset), strict=True):
            vars(dataset).setdefault(name, values)


_REPLACED_AFTER_PICKLE = "was replaced after the dataset was pickled; build the dataset again"


def _state_of_pair(pair):
    """Return what the pickle of a pair holds: its identity, and attributes not in the files."""
    return _picklable_state(pair) | {"_identity": _identity_of_pair(pair)}


def _restore_pair(pair, state):
    """Set the attributes of a pickled pair, and open its files again.

    Raises DatasetFormatError if its data have changed.
    """
    identity = state.pop("_identity")
    vars(pair).update(state)
    pair._open()
    _check_identity(pair, identity, f"{pair.path_prefix} {_REPLACED_AFTER_PICKLE}")
    vars(pair).update(state)  # arrays that a user has set replace the arrays of the files


# Pickle calls these methods.  They are set here to keep caches out of part I.
IndexedDataset.__getstate__ = _state_of_pair
IndexedDataset.__setstate__ = _restore_pair
GPTDataset.__getstate__ = BlendedDataset.__getstate__ = _state_of_dataset
GPTDataset.__setstate__ = BlendedDataset.__setstate__ = _restore_dataset


# -- The cache of a dataset ---------------------------------------------------------------------


def _json_default(value):
    """Return what json writes for an object of an unknown class, such as a tokenizer or a Path."""
    return getattr(value, "unique_identifiers", str(value))


def _identifiers_of_orders(dataset):
    """Return the settings of a GPTDataset that change its arrays, but that upstream's text lacks.

    Defaults are left out, so that the cache files have upstream's names.
    """
    identifiers = {}
    if not dataset._x:
        identifiers["add_extra_token_to_sequence"] = False
    if dataset._keeps_short:
        identifiers["drop_last_partial_validation_sequence"] = False
    if dataset.config.stable_order:
        identifiers["stable_order"] = True
    return identifiers


def _load_or_build_dataset_arrays(dataset):
    """Return (plan, arrays) as GPTDataset._build_arrays() does, from the cache if possible."""
    made_from = {"documents": _digest_of_documents(dataset)} | _identifiers_of_orders(dataset)
    made_from |= _lengths_in_use(dataset.dataset, "lengths_crc32")
    pair = dataset.dataset if isinstance(dataset.dataset, IndexedDataset) else None
    plan, arrays = _load_or_build(dataset, dataset.index_split, made_from, pair)
    return EpochPlan(*plan), arrays  # a plan from the cache is a list


def _samples_per_dataset(dataset_index: np.ndarray, num_datasets: int) -> list[int]:
    """Count how often each dataset occurs in dataset_index."""
    taken = np.zeros(num_datasets, np.int64)
    # in parts: bincount() copies its input to int64, and a blend may have billions of entries
    for low in range(0, len(dataset_index), 1 << 14):
        taken += np.bincount(dataset_index[low : low + (1 << 14)], minlength=num_datasets)
    return taken.tolist()


def _load_or_build_blend_arrays(dataset):
    """Return (samples taken, arrays) as BlendedDataset._build_arrays() does, or from the cache.

    The arrays depend only on unique_description: not on other settings, nor on a pair.
    """
    return _load_or_build(dataset, dataset.split, made_from={}, pair=None)


def _set_identifiers_of_dataset(dataset):
    """Set unique_identifiers of a MegatronDataset, and the attributes derived from it.

    A GPTDataset adds the settings that upstream's text lacks, unless they have their defaults.
    """
    identifiers = collections.OrderedDict({"class": type(dataset).__name__})  # as in upstream
    identifiers |= {"dataset_path": dataset.dataset_path, "num_samples": dataset.num_samples}
    identifiers["index_split"] = dataset.index_split.name
    for name in dataset._key_config_attributes():
        identifiers[name] = getattr(dataset.config, name)
    if isinstance(dataset, GPTDataset):
        identifiers |= _identifiers_of_orders(dataset)
    _name_cache_files(dataset, identifiers)


def _set_identifiers_of_blend(blend):
    """Set unique_identifiers of a BlendedDataset, and the attributes derived from it."""
    identifiers = collections.OrderedDict({"class": type(blend).__name__})  # as in upstream
    identifiers["datasets"] = [dataset.unique_identifiers for dataset in blend.datasets]
    identifiers |= {"split": blend.split.name, "weights": blend.weights, "size": blend.size}
    if blend.phases is not None:
        identifiers["phases"] = blend.phases
    _name_cache_files(blend, identifiers)


def _name_cache_files(dataset, identifiers):
    """Set unique_identifiers, unique_description, unique_description_hash and _cache_folder.

    unique_description is the text of the identifiers, as JSON, as upstream writes it.  The names of
    the cache files contain its MD5.
    """
    dataset.unique_identifiers = identifiers
    dataset.unique_description = json.dumps(identifiers, indent=4, default=_json_default)
    dataset.unique_description_hash = _md5(dataset.unique_description)
    dataset._cache_folder = _folder_of_cache(dataset)


def _folder_of_cache(dataset):
    """Return the absolute path of the cache folder of a dataset, or None if it is not cached.

    Without path_to_cache, blends and datasets without a path are not cached.  The folder of a
    corpus is then beside its pair or, for a URL, in the folder for local copies of .idx files.
    """
    if dataset.config.path_to_cache:
        return _absolute_path(dataset.config.path_to_cache)
    if isinstance(dataset, BlendedDataset) or dataset.dataset_path is None:
        return None
    prefix = getattr(dataset.dataset, "absolute_prefix", dataset.dataset_path)
    folder = f"{_absolute_path(prefix)}/cache"
    if _is_remote(prefix):
        if not isinstance(dataset.dataset, IndexedDataset):
            return None
        folder = dataset.dataset.object_storage_config.path_to_idx_cache
    return f"{folder}/{type(dataset).__name__}_indices"


def _digest_of_documents(dataset):
    """Return a text that identifies the documents of a MegatronDataset.

    It is their range, or the MD5 of their array.
    """
    documents = dataset._documents
    if not isinstance(documents, range):
        documents = _md5(documents.astype(np.int64).tobytes())
    return str(documents)


def _as_range(documents):
    """Return indices of documents as a range if they are consecutive, otherwise as an array."""
    if isinstance(documents, range) and documents.step == 1:
        return documents
    documents = np.asarray(documents)
    if len(documents) == 0:
        return range(0)
    if documents.dtype.kind not in "iu":
        raise TypeError(f"indices of documents must be integers, got {documents.dtype}")
    if np.array_equal(documents, documents[0] + np.arange(len(documents))):
        return range(int(documents[0]), int(documents[-1]) + 1)
    return documents


# ==============================================================================
# 16. Object storage
# ==============================================================================
# Question: how are tokens read over a network, or without memory mapping?
#
# A prefix such as s3://bucket/corpus or https://host/corpus names a pair on object storage.  The
# module reads it with the package fsspec, which is installed with torch, and never writes to it.
#
#   s3://bucket/corpus.idx   is copied to a local folder as a1b2....idx, and the copy is opened
#
#   s3://bucket/corpus.bin   a a a a b b b c c c c c c       read_many([(0, 4), (8, 2)])
#                            |-----|         |-|             requests these two ranges at the same
#                                                            time, and nothing else
#
# Among many requests, at least one nearly always fails.  After a pause, only the ranges that failed
# are requested again:
#
#   first try    range 1 ok   range 2 ok   range 3 --   range 4 ok
#   second try                             range 3 ok


@dataclasses.dataclass
class ObjectStorageConfig:
    """Settings that say how pairs on object storage are read.

    path_to_idx_cache   folder for local copies of .idx files; a relative path becomes absolute.
                        None: ~/.cache/megatron_min
    bin_chunk_nbytes    accepted and ignored, because exact ranges of the .bin are read

    Copies of .idx files are never removed, not even after the object has changed.

    Upstream differs: by default it reads the .bin in blocks of 256 MiB.
    """

    path_to_idx_cache: str | os.PathLike | None = None
    bin_chunk_nbytes: int = 0

    def __post_init__(self) -> None:
        folder = self.path_to_idx_cache or os.path.expanduser("~/.cache/megatron_min")
        self.path_to_idx_cache = _absolute_path(folder)


def _map_tokens(path, dtype):
    """Map a file of tokens into memory, read-only.

    The error message says how to read the file without mapping it.
    """
    if os.path.getsize(path) == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    advice = "to read it, pass mmap=False, or mmap_bin_files=False in a config"
    with _naming_failure(path, f"cannot be memory-mapped ({advice})", OSError):
        return np.asarray(np.memmap(path, dtype, "r"))


class _FileTokens:
    """The tokens of a .bin file that is not mapped (mmap=False) but stays open."""

    def __init__(self, path, dtype):
        self.path = path
        self.dtype = np.dtype(dtype)
        self._file = open(path, "rb", buffering=0)
        weakref.finalize(self, self._file.close)  # closes the file when this object is gone

    def read(self, first, count):
        """Return a new array of count tokens of the file, starting with token first."""
        size = self.dtype.itemsize
        content = _read_bytes(self._file, first * size, count * size, self.path)
        return np.frombuffer(content, self.dtype)

    read_many = _MappedTokens.read_many  # calls read() for each span


def _read_bytes(file, begin, size, path):
    """Return size bytes of an open file, starting at byte offset begin.

    The current position of the file is not used, because threads and forked processes share it.
    Raises DatasetFormatError if the file ends too early.
    """
    content = bytearray()
    while len(content) < size:  # the system may return fewer bytes than requested
        with _naming_failure(path, "cannot be read", OSError):
            part = os.pread(file.fileno(), size - len(content), begin + len(content))
        if not part:
            raise DatasetFormatError(
                f"{path} has only {len(content)} of {size} bytes at offset {begin}: it was "
                "truncated after it was opened; restore the file, and open it again"
            )
        content += part
    return content


class _RemoteFile:
    """An object on object storage: the .bin or .idx of a pair, or an input of preprocess().

    dtype      dtype of the tokens that read() returns; the default returns bytes
    is_input   True: an input, whose URL may have a query or be a chain (see _check_no_secrets)

    Threads, forked processes and unpickled copies may use this object, because fsspec gives each of
    them its own connection.
    """

    _RETRY_DELAYS = (0.1, 0.3, 1, 3)  # seconds before each further try
    _PERMANENT_ERRORS = {  # errors that a retry would repeat, and HTTP statuses that mean the same
        FileNotFoundError: (404, 410),
        PermissionError: (401, 403),
        io.UnsupportedOperation: (),
    }
    # Keys of fsspec's info() that identify the version of an object; each storage has its own.
    _VERSION_KEYS = (
        "ETag", "etag", "blob_id", "sha",
        "Last-Modified", "LastModified", "modificationTime", "mtime", "created",
    )  # fmt: skip

    def __init__(self, url, dtype=np.uint8, is_input=False):
        _check_no_secrets(url, is_input)
        self.url = os.fsdecode(url)
        self.dtype = np.dtype(dtype)

    def read(self, first, count):
        """Return a new array of count tokens of the file, starting with token first."""
        return self.read_many([(first, count)])[0]

    def read_many(self, spans):
        """Return a new array for each (first, count); all ranges are fetched at the same time."""
        size = self.dtype.itemsize
        ranges = [(first * size, (first + count) * size) for first, count in spans]
        contents = {(begin, end): None for begin, end in ranges if begin < end}
        self._with_retries(self._fetch_missing, contents)
        return [np.frombuffer(contents.get(span, b""), self.dtype) for span in ranges]

    def _fetch_missing(self, file_system, path, contents):
        """Fetch the ranges whose value in contents, {(begin, end): bytes or None}, is None.

        The bytes that arrive are stored in contents, even if an error is then raised.
        """
        missing = [span for span, content in contents.items() if content is None]
        begins = [begin for begin, _ in missing]
        ends = [end for _, end in missing]
        answers = file_system.cat_ranges([path] * len(missing), begins, ends, on_error="return")
        error = None
        for (begin, end), content in zip(missing, answers, strict=True):
            if isinstance(content, BaseException):
                error = content
            elif len(content) == end - begin:
                contents[begin, end] = content
            else:
                error = OSError(f"expected {end - begin} bytes at {begin}, got {len(content)}")
                if len(content) > end - begin:
                    advice = "copy the object to storage that supports range requests"
                    raise io.UnsupportedOperation(f"the server ignores ranges ({error}); {advice}")
        if error is not None:
            raise error

    def stamp(self):
        """Return the stamp of the object: {"size": bytes, "changed": version, or "" if unknown}."""
        info = self._with_retries(self._info)
        if info["size"] is None:
            advice = "copy the object to a local disk, or to storage that reports it"
            raise OSError(f"{self.url}: the storage does not report the object's size; {advice}")
        changed = [str(info[name]) for name in self._VERSION_KEYS if name in info]
        return {"size": info["size"], "changed": " ".join(changed)}

    def _info(self, file_system, path):
        """Return fsspec's info() of the object.  Raises FileNotFoundError for a folder."""
        file_system.invalidate_cache(path)  # otherwise fsspec may repeat an older answer
        info = file_system.info(path)
        if info["type"] == "directory":
            raise FileNotFoundError("this is a folder, not an object")
        return info

    def resolve(self):
        """Return [(URL, size or None)] of the object, or of all objects that match the URL."""
        with contextlib.suppress(FileNotFoundError):
            return [(self.url, self._with_retries(self._info)["size"])]
        return self._with_retries(self._glob)

    def _glob(self, file_system, path):
        """Return [(URL, size or None)] of all objects that match a pattern, sorted."""
        file_system.invalidate_cache()
        matches = []
        for name, info in sorted(file_system.glob(path, detail=True).items()):
            if info["size"] is None:  # e.g. in a listing that is a web page
                info = file_system.info(name)
            matches.append((file_system.unstrip_protocol(name), info["size"]))
        return matches

    def _with_retries(self, function, *arguments):
        """Return function(file_system, path, *arguments); repeat a call that fails.

        A permanent error is raised at once, any other error after the last delay.  The message
        begins with the URL.
        """
        import fsspec  # it is installed with torch

        file_system, path = fsspec.core.url_to_fs(self.url)  # fsspec reuses its file systems
        _keep_file_systems()
        for delay in (*self._RETRY_DELAYS, None):
            try:
                return function(file_system, path, *arguments)
            except Exception as error:
                if self.url.startswith("http") and isinstance(error, FileNotFoundError):
                    # fsspec raises FileNotFoundError for every failure; the real error is its cause
                    error = error.__cause__ or error
                kind = OSError  # not permanent
                for permanent, statuses in self._PERMANENT_ERRORS.items():
                    if isinstance(error, permanent) or getattr(error, "status", None) in statuses:
                        kind = permanent
                if delay is None or kind is not OSError:
                    raise kind(f"{self.url}: {type(error).__name__}: {error}") from error
            time.sleep(delay)


_file_systems = {}  # {id: file system}; a set would drop a file system that equals an older one


def _keep_file_systems():
    """Keep all file systems of fsspec alive in this process, and so in processes forked from it.

    A forked process could otherwise garbage-collect the parent's file systems.  Their finalizers
    would remove the parent's sockets from the event loop, which both processes share, and the
    parent's next request would wait 300 s.
    """
    import fsspec  # it is installed with torch

    for kind in list(fsspec.registry.values()):
        cached = list(getattr(kind, "_cache", {}).values())
        _file_systems.update(zip(map(id, cached), cached, strict=True))


def _fetch_idx(url, stamp, config):
    """Return the path of a local copy of an .idx file.  Make the copy if it is missing."""
    name = _md5(f"{url} {stamp['size']} {stamp['changed']}")
    copied = os.path.join(config.path_to_idx_cache, f"{name}.idx")
    is_complete = os.path.exists(copied) and os.path.getsize(copied) == stamp["size"]
    if not is_complete or not stamp["changed"]:  # without a version, the copy may be out of date
        os.makedirs(config.path_to_idx_cache, exist_ok=True)
        remote = _RemoteFile(url)
        at_a_time = 64 << 20  # bytes
        with _NewFile(copied) as file:
            for begin in range(0, stamp["size"], at_a_time):
                file.write(remote.read(begin, min(at_a_time, stamp["size"] - begin)))
            _check_unchanged(url, stamp, "copied")
    return copied


# Matches a URL, or one URL of a chain, that may contain a password.  Any URL may contain one,
# unless the part between :// and the next slash is only a name or an [IPv6 address], with an
# optional port.  For http and https, a name with an @, as in https://user@host, matches, too.
_PASSWORD = re.compile(
    r"://(?![^/:]*(\[[^/\]]*\])?(:[0-9]+)?(/|\Z|::[^/@]*://))|https?://[^/]*@", re.IGNORECASE
)


def _check_no_secrets(names, is_input=False):
    """Check that URLs hold no secrets.  names may be a nested list.

    Raises ValueError for a URL with a password.  The URL of a pair must also have no query, which
    may hold a signature.  Nor may it be an fsspec chain such as simplecache::s3://..., whose cache
    would hide changes to the object.  No message repeats the URL.
    """
    if isinstance(names, (str, bytes, os.PathLike)):
        url = os.fsdecode(names)
        if _PASSWORD.search(url) or (not is_input and re.search(r"://.*\?", url)):
            secret = "input: the URL may contain a password"
            if not is_input:
                secret = 'path: the URL may contain a secret (a password, or what follows "?")'
            advice = "pass it to fsspec in an environment variable, such as FSSPEC_S3_SECRET"
            raise ValueError(f"{secret}; remove it from the URL, and {advice}")
        if not is_input and re.search(r"::[^/]*://", url):
            reason = "the URL of a pair must not be an fsspec chain (a::b)"
            raise ValueError(f"path: {reason}; pass only the last URL of the chain (b)")
    elif isinstance(names, collections.abc.Sequence):
        for name in names:
            _check_no_secrets(name, is_input)


# ==============================================================================
# 17. One error for every rank
# ==============================================================================
# Question: what do the other ranks do when one rank fails?
#
# Without this section, a rank that fails would leave the other ranks waiting in their next
# collective.  A timeout would end them, and none of their logs would say why.
#
#            step()             smallest of all     rank 2 broadcasts    every rank raises
#   rank 0   works     -> 4 --+                   +-- kind and message ---> "rank 2: no such file"
#   rank 1   works     -> 4 --+--> all_reduce     +-----------------------> "rank 2: no such file"
#   rank 2   raises    -> 2 --+     gives 2       +-----------------------> its own error
#   rank 3   works     -> 4 --+                   +-----------------------> "rank 2: no such file"
#
# A rank on which step() works sends the number of ranks, here 4.  A rank on which it fails sends
# its own rank.  If step() works on all ranks, nothing more is sent.
#
# A process that dies, or is ended by a signal, sends nothing.  Its launcher (torchrun) stops the
# other processes, and reports which process ended.


def _try_call(step, *arguments):
    """Call a function.  Return its result and None, or None and the error that it raised.

    KeyboardInterrupt, SystemExit and GeneratorExit are not caught.  Every other BaseException is
    caught, because a panic in native code is not an Exception.
    """
    try:
        return step(*arguments), None
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        return None, error


def _device_of_group(group=None):
    """Return the device of the tensors that a group can send.

    A group may have several backends, such as "cpu:gloo,cuda:nccl".
    """
    if _is_distributed() and "nccl" in torch.distributed.get_backend_config(group):
        return torch.device("cuda")
    return torch.device("cpu")


def _call_and_wait(step, group=None):
    """Call step() on every rank of a group.  If it fails on one rank, raise an error on every rank.

    A rank whose step is None calls nothing, and only waits for the other ranks.

    Returns what step() returns on this rank.  A rank on which step() failed raises its own error.
    Every other rank raises an error with the message of the lowest rank that failed.

    step() may call collectives, if every rank reaches each of these calls.
    """
    world = _world_size(group)
    if world == 1:
        return None if step is None else step()
    result, error = (None, None) if step is None else _try_call(step)
    mine = world if error is None else _rank(group)
    first_failed = torch.tensor(mine, device=_device_of_group(group))
    torch.distributed.all_reduce(first_failed, torch.distributed.ReduceOp.MIN, group=group)
    if first_failed < world:
        _raise_on_every_rank(int(first_failed), error, group)
    return result


def _call_on_rank_0_first(step, is_wanted):
    """Call step() on rank 0, and then on each other rank on which it is wanted.

    Returns what step() returns on this rank, or None.  If it fails on one rank, every rank raises
    an error, as in _call_and_wait().
    """
    #   rank 0                  other ranks
    #   _call_and_wait(step)    _call_and_wait(None)    until rank 0 has called step()
    #   _call_and_wait(None)    _call_and_wait(step)    until all ranks have called it
    if _rank() == 0:
        result = _call_and_wait(step)
        _call_and_wait(None)
        return result
    _call_and_wait(None)
    return _call_and_wait(step if is_wanted else None)


def _raise_on_every_rank(failed_rank, error, group):
    """Raise an error on every rank of a group, because its rank failed_rank has failed.

    Every rank of the group calls this function, with its own error or with None.  A rank that has
    an error raises it.  Every other rank raises an error with the message of failed_rank: a
    ValueError or StopIteration if failed_rank has one, else a RuntimeError that names the class.
    The message begins with the rank of failed_rank in the whole job.
    """
    message = f"rank {_rank()}: "
    with contextlib.suppress(Exception):  # the __str__() of the error may fail
        message += str(error)
    kinds = [kind for kind in (ValueError, StopIteration) if isinstance(error, kind)]
    if len(kinds) == 0:
        kinds = [RuntimeError]
        message += f" ({type(error).__name__})"
    kind_and_message = [kinds[0], message]
    torch.distributed.broadcast_object_list(kind_and_message, group=group, group_src=failed_rank)
    if error is not None:
        raise error
    kind, message = kind_and_message
    raise kind(message)


# ==============================================================================
# 18. The C kernels
# ==============================================================================
# Question: which loops does C replace, and how is C switched on and off?
#
#   definition, above                   adapter, below                 loop, in _helpers.c
#   _fill_rows                          _c_fill_rows                   build_sample_idx
#   shuffle                             _c_shuffle                     shuffle
#   _fill_blend                         _c_fill_blend                  build_blend
#   _make_batch                         _c_make_batch                  read_samples
#   GPTDataset.__getitem__              _c_getitem                     read_samples
#
# An adapter takes the same arguments as its definition, and returns the same result or raises the
# same error.  functools.wraps() gives it the docstring of the definition, and keeps the definition
# as adapter.__wrapped__.  A loop rejects an array that is not contiguous, or an index out of range.
# The adapter then calls the definition, which handles this input or raises the error.
#
# _helpers.c is built as the extension module _megatron_min.  The environment variable
# MEGATRON_MIN_C says whether to use it:
#
#   MEGATRON_MIN_C=0   do not use it
#   MEGATRON_MIN_C=1   use it; raise ImportError if it is missing or cannot be used
#   otherwise          use it if possible; warn if it is installed but cannot be used
#
# A build with a different VERSION is not used, because its functions may be missing or take
# different arguments.  A build with fused multiply-adds raises ImportError when it is imported,
# because it would compute different blends.

_VERSION_OF_C = 2  # VERSION in _helpers.c; change both if a function of C changes

IMPLEMENTATION = "python"
if os.environ.get("MEGATRON_MIN_C") != "0":
    try:
        import _megatron_min

        _version = getattr(_megatron_min, "VERSION", None)  # older builds lack it
        if _version != _VERSION_OF_C:
            raise ImportError(
                f"{_megatron_min.__spec__.origin}: expected version {_VERSION_OF_C}, got "
                f"{_version}; build it again"
            )
        IMPLEMENTATION = "c"
    except ImportError as error:
        if os.environ.get("MEGATRON_MIN_C") == "1":
            _message = (
                f"MEGATRON_MIN_C=1, but the C kernels cannot be used: {error}.  To build them, run "
                "pip install . in a clone of megatron_min.  To go without, set MEGATRON_MIN_C=0"
            )
            if __name__ == "__main__":
                sys.exit(_message)
            raise ImportError(_message) from error
        if not isinstance(error, ModuleNotFoundError):
            _warn(f"the C kernels cannot be used, so Python does their work: {error}")


@functools.wraps(_fill_rows)
def _c_fill_rows(*arguments):
    with contextlib.suppress(OverflowError, TypeError, ValueError):
        _megatron_min.build_sample_idx(*arguments)
        return
    _c_fill_rows.__wrapped__(*arguments)


_generators = threading.local()  # one random_state for each thread


def _random_state(seed: int) -> np.random.RandomState:
    """Return np.random.RandomState(seed), which is valid until the next call in this thread.

    numpy needs 0.25 ms to make a RandomState, because it draws a random seed first.  This is a
    fifth of the time that it takes to build a small GPTDataset, so each thread seeds a single
    RandomState.
    """
    if not hasattr(_generators, "random_state"):
        _generators.random_state = np.random.RandomState()
    _generators.random_state.seed(seed)
    return _generators.random_state


# With fewer items, copying numpy's state to C takes longer than the shuffle.
_MIN_ITEMS_FOR_C = 4096


@functools.wraps(shuffle)
def _c_shuffle(items, random_state):
    is_plain = type(items) is np.ndarray and type(random_state) is np.random.RandomState
    if is_plain and items.size >= _MIN_ITEMS_FOR_C:
        state = random_state.get_state(legacy=False)  # a copy
        if state["bit_generator"] == "MT19937":
            generator = state["state"]
            # C changes items and key in place, or raises an error before it changes anything.
            with contextlib.suppress(TypeError, ValueError):
                generator["pos"] = _megatron_min.shuffle(items, generator["key"], generator["pos"])
                random_state.set_state(state)
                return
    _c_shuffle.__wrapped__(items, random_state)


@functools.wraps(_fill_blend)
def _c_fill_blend(*arguments):
    with contextlib.suppress(OverflowError, TypeError, ValueError):
        _megatron_min.build_blend(*arguments)
        return
    _c_fill_blend.__wrapped__(*arguments)


_NO_EOD = -(2**63)  # no token has this id


# read_samples writes a batch as a table, in which each sample is one row.  For a blend it is called
# once for each dataset, and writes the rows of this dataset.  With S = 4:
#
#   indices   tokens     labels     loss_mask   position_ids
#   0         b b b c    b b c c    1 1 1 1     0 1 2 3
#   2         a a a a    a a a b    1 1 1 1     0 1 2 3
#
# It is used for a GPTDataset with a memory-mapped pair, and for a blend of such datasets if all
# share the blend's config.  A subclass may redefine its samples, so C is never used for it.


@functools.wraps(_make_batch)
def _c_make_batch(dataset, indices):
    columns = _make_columns(dataset, indices) if len(indices) else None
    if columns is None:
        return _c_make_batch.__wrapped__(dataset, indices)
    return {key: torch.from_numpy(values) for key, values in columns.items()}


@functools.wraps(GPTDataset.__getitem__)
def _c_getitem(self, idx):
    columns = _make_columns(self, [idx])
    if columns is None:
        return _c_getitem.__wrapped__(self, idx)
    # max_seqlen is 1-D: values[0, ...] is an array without axes, but values[0] would be a number
    return {key: torch.from_numpy(values[0, ...]) for key, values in columns.items()}


def _make_columns(dataset, indices):
    """Make a batch as a table, {key: array (B, ...)}.  Return None if C cannot do it."""
    columns = {}
    if type(dataset) is GPTDataset:
        rows_of_parts = [(dataset, range(len(indices)), indices)]
    elif type(dataset) is BlendedDataset:
        columns["dataset_id"] = np.empty(len(indices), np.int64)
        rows_of_parts = []
        for d, (rows, ks) in _rows_of_datasets(dataset, indices).items():
            columns["dataset_id"][rows] = d
            rows_of_parts.append((dataset.datasets[d], rows, ks))
    else:
        return None
    columns |= _empty_columns(dataset.config, len(indices))
    for part, rows, ks in rows_of_parts:
        c_can_read = type(part) is GPTDataset and part.config is dataset.config
        if not c_can_read or not _fill_columns(part, columns, rows, ks):
            return None
    for row, idx in enumerate(indices):
        if idx is None:  # the padding sample has no loss
            columns["loss_mask"][row] = 0
    return columns


def _empty_columns(config, count):
    """Make a table for count samples, not yet filled, with its keys in upstream's order."""
    S = config.sequence_length
    columns = {}
    columns["tokens"] = np.empty((count, S), np.int64)
    columns["labels"] = np.empty((count, S), np.int64)
    if config.has_dense_mask:
        columns["attention_mask"] = np.empty((count, 1, S, S), bool)
    columns["loss_mask"] = np.empty((count, S), np.float32)
    columns["position_ids"] = np.empty((count, S), np.int64)
    if config.inter_document_masking:
        columns["cu_seqlens"] = np.empty((count, S + 1), np.int32)
        columns["max_seqlen"] = np.empty(count, np.int32)
    return columns


def _fill_columns(dataset, columns, rows, samples):
    """Write samples into these rows of a table.  Return whether C could do it.

    C cannot do it if an array has an unexpected type, or if an index in an array is out of range.
    """
    config = dataset.config
    corpus = dataset.dataset
    if type(corpus) is not IndexedDataset or corpus.mapped_tokens is None:
        return False
    samples = [0 if k is None else k for k in samples]
    with contextlib.suppress(OverflowError, TypeError, ValueError):
        return _megatron_min.read_samples(
            columns["tokens"],
            columns["labels"],
            columns["loss_mask"],
            columns["position_ids"],
            columns.get("cu_seqlens"),
            columns.get("max_seqlen"),
            columns.get("attention_mask"),
            array.array("q", rows),
            array.array("q", samples),
            corpus.mapped_tokens,
            corpus.sequence_pointers,
            corpus.sequence_lengths,
            dataset.document_index,
            dataset.sample_index,
            dataset.shuffle_index,
            dataset._x,
            dataset._pad_token_id,
            _NO_EOD if dataset.eod_token_id is None else dataset.eod_token_id,
            config.reset_position_ids,
            config.eod_mask_loss,
            config.reset_attention_mask,
        )
    return False


if IMPLEMENTATION == "c":
    _fill_rows = _c_fill_rows
    shuffle = _c_shuffle
    _fill_blend = _c_fill_blend
    _make_batch = _c_make_batch
    GPTDataset.__getitem__ = _c_getitem


# ==============================================================================
# PART IV: THE TOOLS
# ==============================================================================
#
# ==============================================================================
# 19. Tokenizers
# ==============================================================================
# Question: which tokenizers can a command use?
#
# build_tokenizer() makes a tokenizer from its name, the value of --tokenizer in a command:
#
#   bytes            ByteTokenizer(), see section 2
#   null:50000       NullTokenizer(50000), for texts of decimal ids
#   FILE             HuggingFaceTokenizer(FILE).  FILE is a tokenizer.json or its folder
#   gigatoken:FILE   the same tokenizer, but the package gigatoken reads FILE.  Many times faster
#   module:thing     the attribute thing of your module: a tokenizer, or a class or function that
#                    makes one when it is called without arguments
#
# Functions take any object with the attributes that section 2 lists.  They check these attributes
# once, and the result of tokenize() at each call.

_TOKENIZER_NAMES = "bytes, null:N, a tokenizer.json or its folder, gigatoken:FILE, or module:name"


class NullTokenizer:
    """A tokenizer for texts of decimal ids, separated by spaces.

    vocab_size   number of ids without eod: the ids are 0 .. vocab_size - 1, and eod is vocab_size.
                 The attribute vocab_size counts eod, so it is larger by 1

    >>> tokenizer = NullTokenizer(100)
    >>> tokenizer.tokenize("7 0 99"), tokenizer.eod
    ([7, 0, 99], 100)
    """

    def __init__(self, vocab_size: int | str) -> None:
        self.eod = int(vocab_size)
        self.vocab_size = self.eod + 1
        self.unique_identifiers = {"class": "NullTokenizer", "vocab_size": self.vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids in a text.  Raises ValueError if it contains anything else."""
        fields = text.split()
        for field in fields:
            if not field.isdecimal() or int(field) > self.eod:
                raise ValueError(f"null:N: expected ids from 0 to {self.eod}, got {field!r:.60}")
        return [int(field) for field in fields]

    def detokenize(self, ids: typing.Iterable[int]) -> str:
        """Return ids as numbers with spaces in between."""
        return " ".join(str(operator.index(token)) for token in ids)


class HuggingFaceTokenizer:
    """A tokenizer loaded from a tokenizer.json by the Hugging Face package tokenizers.

    path                the tokenizer.json, or its folder, as save_pretrained() writes it
    eod_token           text of the end-of-document token.  None: the eos_token in the folder's
                        tokenizer_config.json.  If path is not a folder, or it has no eos_token:
                        <|endoftext|> if the tokenizer.json has this token, otherwise </s>
    add_special_tokens  True: let the file's post-processor add its special tokens to each text,
                        such as BOS, which marks the beginning of a text

    If a document contains the text of a special token, this text becomes that token.  Settings of
    the file that truncate or pad texts have no effect.

    Raises ImportError if the package is missing, and ValueError if the file is not a
    tokenizer.json or lacks the end-of-document token.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        eod_token: str | None = None,
        add_special_tokens: bool = False,
    ) -> None:
        self.path = os.fsdecode(path)
        if os.path.isdir(self.path):
            eod_token = eod_token or _read_eos_token(self.path)
            self.path = os.path.join(self.path, "tokenizer.json")
        tokenizers = _import_extra("tokenizers", self.path)
        content = pathlib.Path(self.path).read_bytes()
        with _naming_failure(self.path, "cannot be read as a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        self._add_special_tokens = add_special_tokens
        names = [str(eod_token)] if eod_token else ["<|endoftext|>", "</s>"]
        known = [name for name in names if self._tokenizer.token_to_id(name) is not None]
        if len(known) == 0:
            reason = f"it has no token {' or '.join(names)}"
            advice = "give the text of its end-of-document token as eod_token (--eod-token)"
            raise ValueError(f"{self.path}: {reason}; {advice}")
        self.eod = self._tokenizer.token_to_id(known[0])
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1  # ids may have gaps
        self.unique_identifiers = {"class": "HuggingFaceTokenizer", "package": "tokenizers"}
        self.unique_identifiers |= {"tokenizer.json": _md5(content), "eod": self.eod}
        if add_special_tokens:
            self.unique_identifiers["add_special_tokens"] = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens).ids

    def tokenize_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, as an array."""
        encode = self._tokenizer.encode_batch_fast
        encodings = encode(texts, add_special_tokens=self._add_special_tokens)
        return [np.frombuffer(array.array("I", each.ids), np.uint32) for each in encodings]

    def detokenize(self, ids: typing.Iterable[int]) -> str:
        """Return the text of ids, including special tokens."""
        ids = [operator.index(token) for token in ids]
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _read_eos_token(folder):
    """Return the eos_token in a folder's tokenizer_config.json, or None if it has none."""
    path = os.path.join(folder, "tokenizer_config.json")
    with contextlib.suppress(FileNotFoundError), _naming_failure(path, "cannot read its eos_token"):
        token = json.loads(pathlib.Path(path).read_bytes()).get("eos_token")
        return token["content"] if isinstance(token, dict) else token
    return None


class _GigatokenTokenizer(HuggingFaceTokenizer):
    """A HuggingFaceTokenizer that gets its ids from the package gigatoken."""

    # gigatoken 0.10 caches all words that it has seen, and so needs about 11 bytes of memory for
    # each byte of text.  Its tokenizer is therefore replaced by a new one after this many bytes of
    # text.  This costs 7 % of the time, and keeps a worker below 1 GiB.
    _RESET_AFTER_BYTES = 48 << 20
    _PROBE_TEXTS = (
        "The quick brown fox isn't THE cat's; they'll go to the lab, of course (or not).",
        "na\u00efve e\u0301 \u03ba\u03b1\u03bb\u03b7 \u043c\u0438\u0440 \u05e9\u05dc\u05d5\u05dd",
        "\u0645\u0631\u062d \u0928\u092e\u0938\u094d\u0924\u0947 \u4f60\u597d\u3002 \ud55c\uad6d",
        "0 12 345 6789 1234567890, 3.14 and 1e-9; \u00bd \u0663\u0664 \U0001f642",
        "def f(x):\n\treturn x[0] == 'a' if x else {}  # no\r\n\n\n    f(__name__)\n",
        " a,  two   three\t\ttabs \n \u00a0\u2028 \n end  ",
    )

    def __init__(self, path: str | os.PathLike, eod_token: str | None = None) -> None:
        super().__init__(path, eod_token)
        self.unique_identifiers["package"] = "gigatoken"
        self._gigatoken = None
        # Both packages make the same ids for usual files, such as the files of GPT-2 and Llama 3.
        # With unusual settings, such as tokens that span words, they may differ.  So compare them.
        some_ids = range(0, self.vocab_size, self.vocab_size // 1000 + 1)
        texts = [*self._PROBE_TEXTS, *(self.detokenize([token]) for token in some_ids)]
        for added in self._tokenizer.get_added_tokens_decoder().values():
            texts += [added.content, f"a{added.content}b", f"a {added.content} b"]
        for text, ids in zip(texts, self.tokenize_batch(texts), strict=True):
            # Pass one text at a time, because for a batch the package tokenizers would start
            # threads, which are lost when a worker is forked.
            if ids.tolist() != super().tokenize(text):
                reason = f"{self.path}: gigatoken and tokenizers disagree on {text!r:.60}"
                raise ValueError(f'{reason}; leave out "gigatoken:" to use tokenizers')

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self.tokenize_batch([text])[0].tolist()

    def tokenize_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, as an array."""
        contents = [text.encode() for text in texts]
        if self._gigatoken is None or self._seen_bytes > self._RESET_AFTER_BYTES:
            gigatoken = _import_extra("gigatoken", self.path)
            with _naming_failure(self.path, 'cannot be read by gigatoken (leave out "gigatoken:")'):
                self._gigatoken = gigatoken.Tokenizer.from_json(self._tokenizer.to_str())
            self._seen_bytes = 0
        self._seen_bytes += sum(map(len, contents))
        # The result is an array of the package awkward: the ids of all texts, concatenated, and the
        # offsets between the texts.
        batch = self._gigatoken.encode_batch(contents, parallel=False)
        layout = batch.layout.to_ListOffsetArray64(True)
        edges = np.asarray(layout.offsets).tolist()
        tokens = np.asarray(layout.content.data)
        return [tokens[begin:end] for begin, end in itertools.pairwise(edges)]

    def __getstate__(self):
        """Pickle all attributes except gigatoken's tokenizer, which cannot be pickled."""
        return self.__dict__ | {"_gigatoken": None}


def build_tokenizer(
    name: str | os.PathLike = "bytes",
    eod_token: str | None = None,
    add_special_tokens: bool = False,
) -> typing.Any:
    """Return the tokenizer with this name.

    name                "bytes", "null:N", the path of a tokenizer.json or of its folder,
                        "gigatoken:PATH", or "module:name" for an attribute of a module
    eod_token           text of the end-of-document token; only for a tokenizer.json
    add_special_tokens  see HuggingFaceTokenizer; only for a tokenizer.json without gigatoken

    With module:thing, the current folder is searched first; it then stays at the end of sys.path.

    Raises FileNotFoundError if a path does not exist, ImportError if a module or a package cannot
    be imported, and ValueError for any other name.

    >>> build_tokenizer("null:100").eod
    100
    """
    name = os.fsdecode(name)
    path = name.removeprefix("gigatoken:")
    if ":" not in path and path != "bytes" and not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file or folder; expected {_TOKENIZER_NAMES}")
    if name.startswith("gigatoken:"):
        if add_special_tokens:
            unsupported = "add_special_tokens is not supported with gigatoken"
            raise ValueError(f'{name}: {unsupported}; leave out "gigatoken:"')
        return _GigatokenTokenizer(path, eod_token)
    if name.endswith(".json") or (name != "bytes" and os.path.isdir(name)):
        return HuggingFaceTokenizer(name, eod_token, add_special_tokens)
    if eod_token or add_special_tokens:
        raise ValueError(f"{name}: eod_token and add_special_tokens need a tokenizer.json")
    if name == "bytes":
        return ByteTokenizer()
    if re.fullmatch("null:[0-9]+", name):
        return NullTokenizer(name.removeprefix("null:"))
    if ":" not in name or name.startswith("null:"):
        raise ValueError(f"unknown tokenizer {name!r}; expected {_TOKENIZER_NAMES}")
    # As with "python -m", the module may be in the current folder, beside the data.
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        with _naming_place(f"tokenizer {name!r}"):
            tokenizer = pkgutil.resolve_name(name)
            is_object = hasattr(tokenizer, "tokenize") and not isinstance(tokenizer, type)
            if callable(tokenizer) and not is_object:
                tokenizer = tokenizer()
    except (ImportError, AttributeError) as error:
        raise ImportError(f"tokenizer {name!r}: {_message_of(error)}") from error
    finally:
        sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)  # worker processes import the module, too
    _check_tokenizer(tokenizer, ["vocab_size", "tokenize"])
    return tokenizer


# The class of each attribute's value, and what messages call it.
_ATTRIBUTES_OF_TOKENIZER = {
    "vocab_size": (typing.SupportsIndex, "a whole number"),
    "eod": (typing.SupportsIndex, "an id"),
    "tokenize": (collections.abc.Callable, "a method"),
    "unique_identifiers": (dict, "a dict that identifies the tokenizer"),
}


def _attribute_of(tokenizer, name):
    """Return an attribute of a tokenizer, or None if it is missing or not implemented."""
    try:
        return getattr(tokenizer, name, None)
    except NotImplementedError:
        return None


def _check_tokenizer(tokenizer, names):
    """Raise ValueError unless a tokenizer is an object with these attributes."""
    if tokenizer is None or isinstance(tokenizer, type):
        raise ValueError(f"tokenizer: expected an object, such as ByteTokenizer(), got {tokenizer}")
    for name in names:
        kind, description = _ATTRIBUTES_OF_TOKENIZER[name]
        if not isinstance(_attribute_of(tokenizer, name), kind):
            class_name = type(tokenizer).__name__
            if isinstance(tokenizer, (str, bytes, os.PathLike)):
                advice = 'pass build_tokenizer("NAME") instead of "NAME"'
                raise ValueError(f"tokenizer: expected an object, got a {class_name}; {advice}")
            raise ValueError(f"tokenizer: {class_name} needs an attribute {name} ({description})")


def _check_tokenizer_of_corpus(tokenizer, append_eod):
    """Raise ValueError unless a tokenizer can make a corpus."""
    _check_tokenizer(tokenizer, ["vocab_size", "tokenize"])
    if append_eod:
        _check_tokenizer(tokenizer, ["eod"])


# ==============================================================================
# 20. Preprocessing
# ==============================================================================
# Question: how is a big corpus tokenized, on all cores and on many machines?
#
#   this process         worker processes, each with a pipe        this process
#   reads the inputs     parse JSON, run the tokenizer             writes the pairs
#
#   block 0  -- pipe 1 ->  worker 1  -- tokens of block 0 ->  .bin, .idx
#   block 1  -- pipe 2 ->  worker 2  -- tokens of block 1 ->  .bin, .idx
#   block 2  -- pipe 1 ->  worker 1  ...
#
# A block is a number of lines of one input.  This process visits the workers in a fixed order: it
# receives the tokens of a worker's block, sends the worker a new block, and then writes the tokens.
# Blocks are therefore written in the order in which they are read.  For any number of workers, the
# files have the same bytes as if encode_jsonl() of section 2 had written them, one pair for each
# JSON key.  A worker holds one block at a time, so no pipe fills up.
#
# Several machines can share the work.  Each of them processes one shard, which is a part of the
# inputs, and merge() joins the pairs of all shards to the bytes that one job would have written.
# An input is never divided.  Imagine all inputs end to end, and cut their bytes into one equal
# share for each shard.  An input belongs to the shard in whose share it begins:
#
#   inputs        a.jsonl                 b.jsonl   c.jsonl.gz       d.jsonl
#   bytes         |-----------------------|---------|----------------|------------------|
#   shares        |         0/3           :          1/3          :         2/3         |
#   read by       0/3                       1/3       1/3              2/3
#
# The record of a pair, PREFIX.record.json, says what the pair was made from.  This is the record of
# books_text_document_00001_of_00003:
#
#   {"tokenizer": {...}, "append_eod": true,            null: only some documents have eod
#    "bin": 1200, "idx": 162,                           sizes of the two files, in bytes
#    "inputs": [["b.jsonl", 1], ["c.jsonl.gz", 5]],     the pair has 1 document of b.jsonl, then 5
#    "job": "5d41402abc4b2a76b9719d911017c592"}         only for shards: a digest of append_eod and
#                                                       of the names and sizes of all inputs

_BLOCK_BYTES = 1 << 19  # size of a block of text; larger blocks need more memory
_LONGEST_LINE = 2**31 - 1  # in bytes; a sequence cannot have more tokens


def preprocess(
    input: typing.Any = None,
    output_prefix: str | os.PathLike | None = None,
    tokenizer: typing.Any = "bytes",
    *,
    texts: typing.Iterable | None = None,
    append_eod: bool = False,
    json_keys: str | list[str] | tuple[str, ...] = ("text",),
    split_sentences: bool = False,
    workers: int = 1,
    shard: tuple[int, int] = (0, 1),
    on_error: str = "stop",
    verbose: bool = False,
) -> dict[str, str]:
    """Tokenize JSON Lines files and write one .bin/.idx pair for each JSON key.

    Return {key: prefix of its pair}, which is <output_prefix>_<key>_document.  Upstream's
    tools/preprocess_data.py writes the same bytes.  A third file, the pair's record, names the
    tokenizer and the inputs, and says whether eod was appended.

    input            a path, a URL, a pattern such as s3://bucket/*.jsonl, or a list of these.
                     Files that match a pattern are read in sorted order.  Files with names ending
                     in .gz or .zst are decompressed; "-" is standard input
    output_prefix    the first part of the name of each pair
    tokenizer        a tokenizer object (section 2) or the name of one (section 19)
    texts            instead of input: an iterable of strings, or of dicts with the JSON keys.
                     Messages count its items as lines
    append_eod       True: append tokenizer.eod to each document that has tokens
    json_keys        the keys to tokenize; each gets its own pair
    split_sentences  True: store each sentence, as nltk finds it, as a sequence.  Names then end in
                     _sentence instead of _document
    workers          how many processes tokenize.  1: this process alone
    shard            (i, n): process only shard i of n, where 0 <= i < n.  Names then end in, for
                     example, _00001_of_00016.  merge() joins the shards and needs their records
    on_error         what to do with a bad line (see below).  "stop": raise ValueError.  "skip":
                     write a document without tokens, and warn at the end
    verbose          True: show a progress bar if tqdm is installed, and print a summary to stderr

    Blank lines are skipped.  A line is bad if

      - it is not a JSON object in UTF-8 with a text, or a list of texts, under each key
      - it is longer than 2**31 - 1 bytes
      - the tokenizer raises an exception on it, or returns ids that cannot be stored

    The ValueError for a bad line names the file, the line and the reason.  If every line is bad, it
    is raised even with "skip".  MemoryError and OSError are not caused by a line, so they always
    end the job.  Raises OSError if an input cannot be read, or if its size or modification time
    changes after the job has begun.

    Until the first pair is renamed to its final name, an error leaves all files as they were,
    including the files of an older pair.  After that, finished pairs stay, but may lack a record.
    If the files of a pair could not both be renamed, an OSError names them.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     prefix = os.path.join(folder, "corpus")
    ...     prefixes = preprocess(texts=["aaaa", "bbb"], output_prefix=prefix, append_eod=True)
    ...     IndexedDataset(prefixes["text"])[:]
    [array([ 97,  97,  97,  97, 256], dtype=uint16), array([ 98,  98,  98, 256], dtype=uint16)]
    """
    _check_preprocess_arguments(input, output_prefix, texts, json_keys, workers, shard, on_error)
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = build_tokenizer(tokenizer)
    _check_tokenizer_of_corpus(tokenizer, append_eod)
    if isinstance(json_keys, str):
        json_keys = [json_keys]
    if texts is None:
        inputs = _find_inputs(input)
    else:
        inputs = [_Input("texts", None, _iter_lines_of_rows(texts, json_keys))]
    suffix = "_sentence" if split_sentences else "_document"
    fields = {"append_eod": append_eod}  # fields of the records
    index, count = shard
    if count > 1:
        suffix += f"_{index:05}_of_{count:05}"  # so that sorted names are in the order of shards
        sizes = [[os.path.basename(each.name), each.file_size] for each in inputs]
        fields["job"] = _md5(json.dumps([sizes, bool(append_eod)]))  # the same in all its shards
        inputs = _inputs_of_shard(inputs, index, count)
    prefixes = {key: f"{os.fsdecode(output_prefix)}_{key}{suffix}" for key in json_keys}
    paths = [_absolute_path(prefix) for prefix in prefixes.values()]  # stays valid after os.chdir()
    identifiers = _identifiers_of(tokenizer)

    started = time.perf_counter()
    encoder = _Encoder(tokenizer, json_keys, append_eod, split_sentences)
    num_bytes, num_bad, bad = _write_pairs(prefixes, encoder, inputs, workers, on_error, verbose)
    counts = [[each.name, each.documents] for each in inputs]
    for path in paths:
        _write_record(path, identifiers, counts, fields)
    if verbose:
        documents = _label_of_count(sum(each.documents for each in inputs), "document")
        rate = num_bytes / 1e6 / (time.perf_counter() - started)
        print(f"{documents}, {num_bytes:,} bytes, {rate:,.1f} MB/s", file=sys.stderr)
    if num_bad > 0:
        skipped = f"{_label_of_count(num_bad, 'bad line')} skipped (stored without tokens)"
        _warn(f"{skipped}: {'; '.join(bad)}{'; ...' if num_bad > len(bad) else ''}")
    empty = [each.name for each in inputs if each.documents == 0]
    if len(empty) > 0:
        _warn(f"no documents in {_label_of_count(len(empty), 'input')}; is {empty[0]} empty?")
    return prefixes


def _check_preprocess_arguments(input, output_prefix, texts, json_keys, workers, shard, on_error):
    """Raise ValueError if an argument of preprocess() is invalid."""
    index, count = shard
    if not 0 <= index < count:
        raise ValueError(f"shard: expected (i, n) with 0 <= i < n, got ({index}, {count})")
    if on_error not in ("stop", "skip"):
        raise ValueError(f'on_error: expected "stop" or "skip", got {on_error!r}')
    if _as_whole(workers, "workers", 1) > 1 and multiprocessing.current_process().daemon:
        raise ValueError("workers: this process is daemonic and can start no worker; use workers=1")
    if len(json_keys) == 0:
        raise ValueError("json_keys: expected at least one key, got none")
    if output_prefix is None:
        raise ValueError("output_prefix is missing; it is the first part of the name of each pair")
    if (input is None) == (texts is None):
        got = "neither" if texts is None else "both"
        raise ValueError(f"pass either input (paths) or texts; got {got}")
    is_table = hasattr(texts, "columns") or hasattr(texts, "to_pylist")  # a table, or its column
    if is_table or isinstance(texts, (str, bytes, collections.abc.Mapping)):
        got = f"expected an iterable of strings or dicts, got a {type(texts).__name__}"
        raise ValueError(f"texts: {got}; convert a table with .to_pylist() or .to_dict('records')")


def _label_of_count(number, noun):
    """Return a number with its noun, such as "1 line" or "2,000 lines"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _write_pairs(prefixes, encoder, inputs, workers, on_error, verbose):
    """Write the pairs, as encode_jsonl() does, but block by block.

    Return the number of bytes read, the number of bad lines, and messages about the first five.
    """
    num_bytes = 0
    num_bad = 0
    first_bad = []
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_progress_bar(inputs, verbose))
        builders = {}
        for key, prefix in prefixes.items():
            builder = IndexedDatasetBuilder(get_bin_path(prefix), encoder.dtype)
            builders[key] = stack.enter_context(builder)
        encoded_blocks = _iter_encoded_blocks(encoder, _iter_blocks(inputs), workers)
        # The iterator is closed even after an exception, so workers never outlive the job.
        stack.enter_context(contextlib.closing(encoded_blocks))
        for (source, lines), encoded in encoded_blocks:
            for num_lines, result in encoded:
                source.lines_read += num_lines
                if isinstance(result, str):  # the reason why a line is bad
                    num_bad += 1
                    if num_bad <= 5:
                        first_bad.append(f"{source.name}, line {source.lines_read}: {result}")
                    result = dict.fromkeys(prefixes, (b"", [], [0]))  # a document without tokens
                for key, (content, lengths, ends) in result.items():
                    begin = len(builders[key].sequence_lengths)
                    builders[key].add_sequences(content, lengths)
                    builders[key].document_indices.extend(begin + end for end in ends)
                source.documents += len(ends)  # the same number for each key
            if num_bad > 0 and on_error == "stop":
                advice = 'to skip bad lines, use on_error="skip" (--on-error skip)'
                raise ValueError(f"{first_bad[0]}; {advice}")
            num_bytes += sum(map(len, lines))
            if bar is not None:
                bar.update(num_bytes - bar.n)
        if num_bad > 0 and num_bad == sum(each.documents for each in inputs):
            raise ValueError(f"every line is bad, for example {'; '.join(first_bad)}")
        for builder in builders.values():
            builder._bin.finish()  # raises OSError if the disk is full, before any pair is renamed
    return num_bytes, num_bad, first_bad


def _progress_bar(inputs, verbose):
    """Return tqdm's bar as a context manager.  Without tqdm or verbose, entering it gives None."""
    if verbose:
        with contextlib.suppress(ModuleNotFoundError):
            import tqdm

            total = sum(each.progress_total for each in inputs)
            # disable=None: show the bar only on a terminal
            return tqdm.tqdm(total=total, unit="B", unit_scale=True, disable=None)
    return contextlib.nullcontext()


# -- Inputs ------------------------------------------------------------------------------------


class _Input:
    """An input, as it was when the job began, and how far the job has read it.

    path        path or URL.  "-": standard input
    file_size   in bytes.  None: not known, for example because path is a pipe
    lines       an iterator of its lines.  None: read the lines of path
    """

    def __init__(self, path, file_size, lines=None):
        self.path = path
        self.file_size = file_size
        self.mtime_ns = _modification_time(path)
        self.name = _label_of_input(path)  # used in messages and records
        self.compression = _decompressor_of(self.name)
        # bytes of all lines.  inf: not known; tqdm then shows no total
        self.progress_total = math.inf if file_size is None or self.compression else file_size
        self.lines = _iter_lines(self) if lines is None else lines
        self.lines_read = 0  # lines encoded so far
        self.documents = 0  # documents that were made from these lines


def _find_inputs(paths):
    """Return an _Input for each file that a path or pattern, or a list of these, names."""
    if isinstance(paths, (str, bytes, os.PathLike)):
        paths = [paths]
    paths = [os.fsdecode(path) for path in paths]
    _check_no_secrets(paths, is_input=True)
    inputs = []
    for path in paths:
        with _input_error_context(path):
            files = _find_sizes(path)
        if len(files) == 0:
            name = _label_of_input(path)
            raise FileNotFoundError(f"{name}: no such file, and as a pattern it matches no file")
        inputs.extend(_Input(name, size) for name, size in files)
    if len(inputs) == 0:
        raise ValueError("input: expected at least one input, got none")
    return inputs


def _find_sizes(path):
    """Return [(path, size in bytes)] of a file, or of all files that match the path as a pattern.

    A path that exists is not a pattern.  A size is None if it is not known.
    """
    if _is_remote(path):
        return _RemoteFile(path, is_input=True).resolve()
    if path == "-":
        return [(path, None)]
    names = [path]
    if not os.path.exists(path):
        names = sorted(name for name in glob.glob(path, recursive=True) if not os.path.isdir(name))
    return [(name, os.path.getsize(name) if os.path.isfile(name) else None) for name in names]


def _modification_time(path):
    """Return when a local file was last written, in ns, or None for anything else, such as a URL.

    Unlike st_ctime_ns, this time does not change when the file gets a link or a new mode.
    """
    return os.stat(path).st_mtime_ns if os.path.isfile(path) else None


def _label_of_input(path):
    """Return what messages call an input: its path, or its URL without the query.

    The query may be secret.
    """
    return path.partition("?")[0] if _is_remote(path) else path


@contextlib.contextmanager
def _input_error_context(path):
    """Name the input in an error that is raised while it is read, without the query of a URL."""
    name = _label_of_input(path)
    try:
        with _naming_failure(name, "cannot be read", OSError):
            yield
    except OSError as error:
        if name == path:
            raise
        # Messages of storage packages contain the whole URL.
        raise OSError(re.sub(r"\?\S*", "", _message_of(error))) from None


def _decompressor_of(name):
    """Return the module that decompresses a file of this name, or None if it is not compressed."""
    lower = name.lower()
    if lower.endswith((".bz2", ".xz", ".lzma", ".zip", ".tar")):
        # Python's bz2 and lzma treat a damaged second stream as the end of the file.
        advice = "unpack or recompress it first, for example with bzcat F | zstd > F.zst"
        raise ValueError(f"{name}: only .gz and .zst can be decompressed; {advice}")
    if lower.endswith(".gz"):
        return gzip
    if not lower.endswith(".zst"):
        return None
    for module in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(module)
    raise ImportError(f"{name} needs Python 3.14's compression.zstd, or pip install backports.zstd")


def _inputs_of_shard(inputs, index, count):
    """Return the inputs of shard number index of count.  Warns if the shards are very unequal."""
    sizes = [each.file_size for each in inputs]
    if None in sizes:
        name = inputs[sizes.index(None)].name
        raise ValueError(f"{name}: its size is unknown, but shards need it; save it to a file")
    total = sum(sizes)
    starts = itertools.accumulate(sizes[:-1], initial=0)
    shards = [min(start * count // max(total, 1), count - 1) for start in starts]  # total may be 0
    num_filled = len(set(shards))
    if num_filled < count or max(sizes) * count > total:
        unequal = f"the shards are unequal ({num_filled:,} of {count:,} have inputs)"
        why = "because no input is divided"
        _warn(f"{unequal}, {why}; divide large ones, e.g. split -n l/16 --additional-suffix=.jsonl")
    return [each for each, shard in zip(inputs, shards, strict=True) if shard == index]


def _iter_lines(source):
    """Yield the lines of an _Input.  At the end, raise OSError if the file has changed."""
    with _input_error_context(source.path), contextlib.ExitStack() as stack:
        if source.path == "-":
            file = sys.stdin.buffer
        elif _is_remote(source.path):
            import fsspec  # it comes with torch

            file = stack.enter_context(fsspec.open(source.path, "rb"))
            _keep_file_systems()
            file = io.BufferedReader(file, 1 << 16)  # fsspec's HTTP stream cannot yield lines
        else:
            file = stack.enter_context(open(source.path, "rb"))
        yield from file if source.compression is None else source.compression.open(file)
        if source.file_size is not None:
            size = file.tell()
            now = size, _find_sizes(source.path), _modification_time(source.path)
            if now != (source.file_size, [(source.path, source.file_size)], source.mtime_ns):
                sizes = f"{source.file_size:,} bytes at the start, {size:,} bytes read"
                raise OSError(f"it changed while the job ran ({sizes}); start the job again")


def _iter_lines_of_rows(texts, json_keys):
    """Yield each text or dict as a line of JSON.

    For anything else, yield a str that says what is wrong.
    """
    for row in texts:
        line = None
        if isinstance(row, str):
            row = {json_keys[0]: row}
        if isinstance(row, collections.abc.Mapping):
            # These errors mean that a key is missing, or that json cannot write a value.
            with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
                line = json.dumps({key: row[key] for key in json_keys}).encode()
        if line is None:
            line = f"expected a text, or a dict with the keys {json_keys}, got {row!r:.60}"
        yield line


def _iter_blocks(inputs):
    """Yield the lines of all inputs in blocks: (input, list of lines)."""
    for source in inputs:
        lines = []
        size = 0
        for line in source.lines:
            lines.append(line)
            size += len(line)
            if size >= _BLOCK_BYTES:
                yield source, lines
                lines = []
                size = 0
        if len(lines) > 0:
            yield source, lines


# -- Workers -----------------------------------------------------------------------------------

_start_lock = threading.Lock()  # several jobs may run in threads of one process


# The first bytes of a compressed file, and the ending that its name must have.
_COMPRESSED = ((b"\x1f\x8b", "gzip", ".gz"), (b"\x28\xb5\x2f\xfd", "zstd", ".zst"))


def _parse_object(line):
    """Return the JSON object on a line, a dict.  Raises ValueError if the line has none."""
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"longer than {_LONGEST_LINE:,} bytes")
    for magic, kind, ending in _COMPRESSED:
        if line.startswith(magic):
            advice = f"decompress it, or give it a name that ends in {ending}"
            raise ValueError(f"not a JSON object: the file is compressed with {kind}; {advice}")
    try:
        value = json.loads(line.decode("utf-8-sig"))  # for bytes, json would guess the encoding
        if isinstance(value, dict):
            return value
        reason = f"it is a {type(value).__name__}"
    except json.JSONDecodeError as error:  # its str() has a line number of its own
        column = len(error.doc[: error.pos].rstrip("\r\n")) + 1
        reason = f"{error.msg.removesuffix(' at')} at column {column}"
    except (ValueError, RecursionError) as error:
        reason = error
    begin = line[:60].decode(errors="replace").strip()
    raise ValueError(f"not a JSON object: {reason}; it begins {begin!r}")


def _parse_texts(line, json_keys):
    """Return {key: list of texts} of the JSON object on a line.  Raises ValueError for a bad line.

    A line that is a str says what is wrong with a row: see _iter_lines_of_rows().
    """
    if isinstance(line, str):
        raise ValueError(line)
    row = _parse_object(line)
    texts = {}
    for key in json_keys:
        if key not in row:
            raise ValueError(f"expected the key {key!r}, got only {list(row)!s:.60}")
        text = row[key]
        try:
            _check_text(text)
            texts[key] = [text] if isinstance(text, str) else text
            "".join(texts[key]).encode()  # raises UnicodeEncodeError for a lone surrogate
        except ValueError as error:
            raise ValueError(f"key {key!r}: {_message_of(error)}") from None
    return texts


class _Encoder:
    """Encodes lines as documents, usually in a worker process.

    ends holds, for each document, the number of sequences up to its end:

    lines                    content (bytes)        lengths   ends
    {"text": "aaaa"}         a a a a $              5         1      $ is eod
    {"text": ""}                                              1      no new sequence
    {"text": ["b", "bb"]}    b b b $                1, 3      3      two new sequences
    """

    def __init__(self, tokenizer, json_keys, append_eod, split_sentences):
        self.tokenizer = tokenizer
        self.json_keys = json_keys
        self.splitter = None
        if split_sentences:
            punkt = _import_extra("nltk.tokenize.punkt", "split_sentences")
            try:
                self.splitter = punkt.PunktTokenizer("english")
            except LookupError:
                self.splitter = punkt.PunktSentenceTokenizer()
                untrained = "nltk's model of English is missing, so an untrained one is used"
                _warn(f"{untrained}; to install it, run: python -m nltk.downloader punkt_tab")
        self.dtype = np.dtype(DType.optimal_dtype(tokenizer.vocab_size))
        eod = [tokenizer.eod] if append_eod else []
        # The dtype is unsigned, because numpy would join int32 and a tokenizer's uint64 as floats.
        self.eod = np.frombuffer(_encode_tokens(eod, self.dtype), f"u{self.dtype.itemsize}")

    def encode_block(self, lines):
        """Return [(number of lines, result of encode() for these lines)].

        A bad line has its own entry, with a str that says what is wrong instead of the result.
        """
        result, error = _try_call(self.encode, lines)
        if error is None:
            return [(len(lines), result)]
        if isinstance(error, (MemoryError, OSError)):  # not caused by a line
            raise error
        if len(lines) == 1:
            return [(1, _message_of(error))]
        half = len(lines) // 2
        return self.encode_block(lines[:half]) + self.encode_block(lines[half:])

    def encode(self, lines):
        """Return {key: (content, lengths, ends)} of the lines that are not blank."""
        rows = [_parse_texts(line, self.json_keys) for line in lines if not line.isspace()]
        return {key: self._encode_documents([row[key] for row in rows]) for key in self.json_keys}

    def _encode_documents(self, documents):
        """Return (content, lengths, ends) of documents, each a list of texts (see section 2)."""
        if self.splitter is not None:
            split = self.splitter.tokenize
            documents = [list(itertools.chain(*map(split, parts))) for parts in documents]
        texts = list(itertools.chain(*documents))
        tokenize_batch = _attribute_of(self.tokenizer, "tokenize_batch")
        outputs = map(self.tokenizer.tokenize, texts)
        if tokenize_batch is not None and len(texts) > 0:  # it may not accept an empty list
            outputs = tokenize_batch(texts)
        arrays = [_as_ids(self.tokenizer, ids) for ids in outputs]
        if len(arrays) != len(texts):
            raise ValueError(f"tokenize_batch returned {len(arrays)} lists for {len(texts)} texts")
        all_ids = iter(arrays)
        pieces = [self.eod[:0]]  # an empty array, because np.concatenate() needs at least one
        lengths = []
        ends = []
        for sentences in documents:
            sequences = [ids for ids in itertools.islice(all_ids, len(sentences)) if len(ids) > 0]
            if len(sequences) > 0:
                lengths.extend(map(len, sequences))
                lengths[-1] += len(self.eod)
                pieces.extend([*sequences, self.eod])
            ends.append(len(lengths))  # a document may have no sequences
        return _encode_tokens(np.concatenate(pieces), self.dtype), lengths, ends


def _iter_encoded_blocks(encoder, blocks, workers):
    """Yield each block, in order, with the result of encoder.encode_block() for its lines.

    Raises ChildProcessError if a worker ends, or raises an error that is not caused by a line.
    """
    if workers == 1:
        for source, lines in blocks:
            yield (source, lines), encoder.encode_block(lines)
        return
    # A forked process is ready at once; any other process imports torch again.  Outside Linux,
    # however, a library may crash in a forked process, or the system cannot fork.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    if sys.platform != "linux":
        encoder = pickle.dumps(encoder)  # _run_worker() extends sys.path before it unpickles this
    slots = []  # for each worker: (process, pipe to the worker, its current block or None)
    try:
        for _ in range(workers):
            # Without the lock, a worker that a different job forks now would inherit both ends of
            # this pipe, and the pipe would not close when its own worker ends.
            with _start_lock:
                pipe, far_end = context.Pipe()
                process = context.Process(target=_run_worker, args=(far_end, encoder), daemon=True)
                slots.append((process, pipe, None))
                with warnings.catch_warnings():
                    # Python 3.12 and later warn if the process has threads; workers use none.
                    warnings.filterwarnings("ignore", ".*multi-threaded.* fork", DeprecationWarning)
                    _start_in_thread(process)
                far_end.close()  # the worker holds it, so the pipe closes when the worker ends
        blocks = itertools.chain(blocks, [None] * workers)  # a last round receives the last results
        for number, block in enumerate(blocks):
            process, pipe, previous_block = slots[number % workers]
            slots[number % workers] = (process, pipe, block)
            try:
                result = pipe.recv()
                if block is not None:
                    pipe.send(block[1])
            except (EOFError, OSError):  # the worker has ended, perhaps while it sent a result
                process.join()
                # A negative code is the number of a signal.  If SIGCHLD is ignored, code is None.
                code = process.exitcode
                name = f", {signal.strsignal(-code)}" if code and code < 0 else ""
                raise ChildProcessError(
                    f"a worker process ended (exit code {code}{name}); if the system ran out of "
                    "memory, use fewer workers; otherwise use workers=1 to see its error"
                ) from None
            if isinstance(result, Exception):
                raise result
            if previous_block is not None:
                yield previous_block, result  # the worker encodes its new block meanwhile
    finally:
        for process, _, _ in slots:
            if process.is_alive():
                process.kill()
                process.join()


def _start_in_thread(process):
    """Start a process in a thread: if the main thread forked, it might lose a signal meanwhile.

    The main thread waits without a lock, because a signal that arrives in Thread.join() or
    Future.result() may leave a lock locked, and both threads would wait forever.
    """
    outcome = []

    def _start():
        try:
            process.start()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    _thread.start_new_thread(_start, ())
    try:
        while len(outcome) == 0:
            time.sleep(0.001)
    finally:  # also after a signal: a process can be ended only when it has started
        while len(outcome) == 0:
            time.sleep(0.001)
    if outcome[0] is not None:
        raise outcome[0]


def _run_worker(pipe, encoder):
    """Encode the blocks that arrive through a pipe, until it closes.  A worker runs this."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A terminal sends Ctrl-C to all processes.  The parent alone reacts, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The worker processes keep all cores busy; threads of the package tokenizers would compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)  # torch would wait for threads that a forked process does not have
    if isinstance(encoder, bytes):
        encoder = pickle.loads(encoder)
    result = None  # the worker is ready for its first block
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send(result)
            result, error = _try_call(encoder.encode_block, pipe.recv())
            if error is not None:  # not a bad line.  The error itself may not be picklable
                result = ChildProcessError(_message_of(error))


def _end_with_parent():
    """End this worker when its parent has ended, even in the middle of a block.

    The pipe does not show this, because workers that were forked later hold copies of the parent's
    end.
    """
    multiprocessing.parent_process().join()
    os._exit(1)


# -- Merge and records -------------------------------------------------------------------------


def merge(
    prefixes: typing.Iterable[str | os.PathLike],
    output_prefix: str | os.PathLike,
    multimodal: bool = False,
) -> None:
    """Join pairs of one dtype into a new pair, which has their documents in the given order.

    prefixes        paths of the pairs.  A path may be given several times
    output_prefix   path of the new pair, which must not be one of these pairs
    multimodal      True: the pairs have modes, which the new pair keeps

    The new pair has the same bytes as if one builder had written it.  Its record lists the inputs
    of all pairs, and the prefix of each pair that has no record.

    If the pairs are shards, all shards of the job must be given, in order, with their records; they
    may be in different folders.  Raises ValueError if the pairs cannot be joined, for example
    because their records name different tokenizers.  Warns if only some were made with append_eod.

    Upstream: tools/merge_datasets.py.

    >>> prefix = toy_corpus()
    >>> merge([prefix, prefix], prefix + "2")
    >>> IndexedDataset(prefix + "2").document_indices.tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    if isinstance(prefixes, (str, bytes, os.PathLike)):
        prefixes = [prefixes]
    prefixes = [os.fsdecode(prefix) for prefix in prefixes]
    if len(prefixes) == 0:
        raise ValueError("prefixes: expected at least one pair, got none")
    records = {prefix: _record_of(IndexedDataset(prefix)) for prefix in prefixes}
    _check_shards(prefixes, records)
    tokenizer = _common_tokenizer(records)
    eod = _common_eod(records)
    dtype = IndexedDataset(prefixes[0]).dtype
    inputs = []
    with IndexedDatasetBuilder(get_bin_path(output_prefix), dtype, multimodal) as builder:
        for prefix in prefixes:
            before = len(builder.document_indices)
            builder.add_index(prefix)
            documents = len(builder.document_indices) - before
            # a pair without a record, such as upstream's, is an input itself
            inputs += records[prefix].get("inputs", [[prefix, documents]])
    _write_record(output_prefix, tokenizer, inputs, eod)


def _append_pair(builder, path_prefix):
    """Append all sequences and documents of a pair to an IndexedDatasetBuilder."""
    other = IndexedDataset(path_prefix, multimodal=builder.multimodal, check=True)
    _check_appended(builder, other)
    before = len(builder.sequence_lengths)
    at_a_time = (16 << 20) // builder._token_dtype.itemsize  # 16 MiB of tokens
    try:
        for first in range(0, other.num_tokens, at_a_time):
            builder._bin.write(other._tokens.read(first, min(at_a_time, other.num_tokens - first)))
        builder.sequence_lengths.frombytes(other.sequence_lengths.tobytes())
        builder.document_indices.frombytes((other.document_indices[1:] + before).tobytes())
        if builder.multimodal:
            builder.sequence_modes.frombytes(other.sequence_modes.tobytes())
    except BaseException:
        builder._bin.discard()  # it may have a part of the pair
        raise


def _check_shards(prefixes, records):
    """Raise ValueError unless shards to be merged are complete, in order, and from the same job."""
    remaining = iter(prefixes)
    for prefix in remaining:
        shard = re.fullmatch(r"(.*)_\d{5,}_of_(\d{5,})", os.path.basename(prefix))
        n = 0 if shard is None else int(shard[2])
        job = records[prefix].get("job")
        for index in range(n):
            if index > 0:
                prefix = next(remaining, "the end of the list")
            name = f"{shard[1]}_{index:05}_of_{shard[2]}"
            if os.path.basename(prefix) != name:  # folders may differ
                raise ValueError(f"expected {name}, got {prefix}; merge all {n} shards in order")
            if records[prefix] == {}:  # only the record names the job
                advice = "copy its .record.json beside it or, if the pair is not a shard, rename it"
                raise ValueError(f"{prefix}: this shard has no record; {advice}")
            if records[prefix].get("job") != job:
                advice = "make all shards from the same files and with the same append_eod"
                raise ValueError(f"{prefix}: not from the same job as the first shard; {advice}")


def _make_record(path_prefix, tokenizer, inputs, fields):
    """Return the record of a pair whose files are complete.

    fields   a dict that may have the keys append_eod (older records lack it) and job

    Raises an exception, of any class, if an argument does not have the expected form.
    """
    record = {
        "tokenizer": None if tokenizer is None else dict(tokenizer),
        "inputs": [[str(name), int(documents)] for name, documents in inputs],
        "bin": os.path.getsize(get_bin_path(path_prefix)),
        "idx": os.path.getsize(get_idx_path(path_prefix)),
    }
    if "append_eod" in fields:
        record["append_eod"] = None if fields["append_eod"] is None else bool(fields["append_eod"])
    if "job" in fields:
        record["job"] = str(fields["job"])
    return record


def _write_record(path_prefix, tokenizer, inputs, fields=()):
    """Write the record of a pair whose two files are complete.  fields: see _make_record()."""
    record = _make_record(path_prefix, tokenizer, inputs, fields)
    with _NewFile(f"{os.fsdecode(path_prefix)}.record.json", synced=False) as file:
        file.write(json.dumps(record, indent=1).encode())


def _record_of(pair):
    """Return the record of an IndexedDataset, or {} if it has none.

    A record that is damaged, or belongs to different files, does not count.  The record is read
    once.  The key "begins" is added: a list with the index of each input's first document and, at
    the end, the number of all documents.
    """
    if "record" not in pair._memo:
        pair._memo["record"] = {}
        with contextlib.suppress(Exception):  # e.g. it is missing, or has an unknown form
            prefix = pair.absolute_prefix
            record = json.loads(pathlib.Path(f"{prefix}.record.json").read_bytes())
            inputs = record["inputs"]
            if record == _make_record(prefix, record["tokenizer"], inputs, record):
                begins = itertools.accumulate((documents for _, documents in inputs), initial=0)
                pair._memo["record"] = record | {"begins": list(begins)}
    return pair._memo["record"]


def _identifiers_of(tokenizer):
    """Return a tokenizer's unique_identifiers, as read back from JSON, or None if it has none."""
    identifiers = _attribute_of(tokenizer, "unique_identifiers")
    identifiers = json.loads(json.dumps(identifiers, default=str))
    return identifiers if isinstance(identifiers, dict) else None


def _common_tokenizer(records, advice="preprocess all of them with one tokenizer"):
    """Return the tokenizer in {name: record}, or None if no record names one.

    Raises ValueError, which names the first value that differs, if the tokenizers differ.
    """
    tokenizers = {name: record.get("tokenizer") for name, record in records.items()}
    tokenizers = {name: each for name, each in tokenizers.items() if each is not None}
    first = next(iter(tokenizers), None)
    for name, tokenizer in tokenizers.items():
        same = {"package": None}  # both packages that read a tokenizer.json make the same ids
        difference = _first_difference(tokenizers[first] | same, tokenizer | same)  # section 10
        if difference is not None:
            key, value, got = difference
            reason = f"{name} was made with a different tokenizer than {first}"
            values = f"its {key} is {got!r:.60}, not {value!r:.60}"
            raise ValueError(f"{reason}: {values}; {advice}")
    return tokenizers.get(first)


_LABELS_OF_EOD = {True: "with eod", False: "without eod", None: "partly with eod"}


def _common_eod(records):
    """Return {"append_eod": value} for {name: record}, or {} if no record has the key.

    If the records differ, the value is None, and a warning names one pair for each value.
    """
    examples = {each["append_eod"]: name for name, each in records.items() if "append_eod" in each}
    if len(examples) > 1:
        made = (f"{name} {_LABELS_OF_EOD[value]}" for value, name in examples.items())
        advice = "if this is a mistake, preprocess them with the same append_eod"
        _warn(f"the pairs differ in append_eod ({', '.join(made)}); {advice}")
        return {"append_eod": None}
    return {"append_eod": next(iter(examples))} if len(examples) > 0 else {}


def _check_tokenizers(opened, tokenizer):
    """Raise ValueError if the records of {prefix: corpus} name different tokenizers.

    Warns if the record of a corpus and the config name different tokenizers, and if only some
    corpora were made with append_eod.
    """
    config_record = {"the config's": {"tokenizer": _identifiers_of(tokenizer)}}
    advice = "give the config the tokenizer of this corpus, or preprocess the corpus again"
    records = {name: _record_of(c) for name, c in opened.items() if isinstance(c, IndexedDataset)}
    for prefix, record in records.items():
        _, difference = _try_call(_common_tokenizer, config_record | {prefix: record}, advice)
        if difference is not None:
            _warn(str(difference))
    _common_tokenizer(records)
    _common_eod(records)


# ==============================================================================
# 21. Other data
# ==============================================================================
# Question: how do mock data and conversations become samples?
#
# Mock data need no files.  MockGPTDataset is a GPTDataset whose tokens are computed when they are
# read.
#
# Conversations, for fine-tuning, are in the rows of a file.  SFTDataset makes a sample from a row:
#
#   a row       {"messages": [{"role": "user", "content": "2+2"},
#                             {"role": "assistant", "content": "4"}]}
#
#   text        u s e r :   2 + 2 ; a s s i s t a n t :   4 $      ; is a newline, $ is eod
#   targets     . . . . . . . . . . . . . . . . . . . . . 4 $      . is -100: not trained on
#
#   a sample    |<- conversation 0 ->|<-- conversation 1 -->|<- padding ->|     S + 1 positions
#   tokens      all positions but the last
#   labels      all targets but the first: the label of a token is the target of the next token
#   cu_seqlens  0                    ^ conversation 1 starts              S S S ...
#
# A row may hold several conversations, because each message with the role "system" begins a new
# one.  The attention kernel of the model uses cu_seqlens to keep the conversations of a sample
# apart.
#
# Sample k is made from row k of the split, modulo the number of rows.  The row is tokenized when
# the sample is read, so there is no file pair, no index array and no cache.  SFTDataset does not
# shuffle: use the sampler "cyclic" (section 8).


class MockGPTLowLevelDataset:
    """100,000 sequences of 1 to 4,095 tokens, computed at each access.

    A sequence is 1, 2, ..., length - 1, each modulo vocab_size, and then eod.

    >>> sequence = MockGPTLowLevelDataset(ByteTokenizer())[0]
    >>> sequence[:3].tolist(), sequence[-1].item()
    ([1, 2, 3], 256)
    """

    def __init__(self, tokenizer: typing.Any) -> None:
        self.tokenizer = tokenizer
        generator = np.random.default_rng(0)
        self.sequence_lengths = generator.integers(1, 4096, size=100_000, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def fingerprint(self) -> dict:
        """Return the two values that determine the tokens."""
        return {"vocab_size": self.tokenizer.vocab_size, "eod": self.tokenizer.eod}

    def __getitem__(self, idx: int) -> np.ndarray:
        numbers_up = np.arange(1, self.sequence_lengths[idx], dtype=np.int64)
        return np.append(numbers_up % self.tokenizer.vocab_size, self.tokenizer.eod)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return length tokens of sequence idx, from offset on; if length is None, all of them."""
        return self[idx][offset : None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """Samples of ascending numbers, for speed tests without data.

    dataset and indices are the arguments that GPTDataset calls indexed_dataset and indexed_indices.
    (All four names are upstream's.)
    """

    def __init__(
        self,
        dataset: MockGPTLowLevelDataset,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> MockGPTLowLevelDataset:
        """Return the mock data; dataset_path is ignored."""
        return MockGPTLowLevelDataset(config.tokenizer)


_IGNORED = -100  # the target of a token that is not trained on; torch's cross_entropy skips it


class SFTDataset(MegatronDataset):
    """Samples of conversations, tokenized when they are read.

    dataset        the rows: any object with len(dataset) and dataset[i]["messages"]
    dataset_path   path of the file, or None
    indices        indices of the rows in this split: ints (D,) or a range
    num_samples    number of samples.  None: as many as the split has rows
    index_split    Split
    config         GPTDatasetConfig.  create_attention_mask must be False, and neither
                   reset_attention_mask nor reset_position_ids may be set

    ds[k] is a dict of new tensors:

      tokens         int64 (S,)
      labels         int64 (S,): the next token, or -100 if it is not trained on; in padding, the
                     id of the padding (see below)
      loss_mask      float32 (S,), 0: the label is -100 or padding
      position_ids   int64 (S,), counted from 0 in each conversation
      cu_seqlens     int32 (S+1,): the positions at which conversations start, then S in all other
                     entries
      max_seqlen     int32 (): length of the longest conversation, with its padding

    A tokenizer may have a template of its own, as upstream's tokenizers for fine-tuning do: a
    method tokenize_conversation(conversation, return_target=True, add_generation_prompt=False)
    that returns tokens and targets.  Without it, the text of a message is "role: content" and
    a line end, or, for the role assistant, "assistant: content" and eod.

    A sample with too many tokens is cut.  A sample with too few is padded:

      the tokenizer has   padding is   these labels have no loss
      a pad               the pad      all that equal the pad, even if the token is real
      no pad              the eod      only the padding; so the model learns to write eod

    If context_parallel_size is cp > 1, each conversation is padded to a multiple of 2 * cp tokens,
    so that section 9 can cut it.  S must also be a multiple of 2 * cp.

    Raises ValueError for a config, a tokenizer or a row that cannot be used.  A warning reports the
    first sample without any loss.

    >>> rows = [{"messages": [{"role": "user", "content": "2+2"},
    ...                       {"role": "assistant", "content": "4"}]}]
    >>> config = GPTDatasetConfig(1234, 32, tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> ds = SFTDataset(rows, None, np.arange(1, dtype=np.int32), None, Split.train, config)
    >>> ByteTokenizer().detokenize(ds[0]["tokens"])
    'user: 2+2\\nassistant: 4'
    >>> ds[0]["labels"][ds[0]["loss_mask"] == 1].tolist()         # the learned tokens: 4 and eod
    [52, 256]
    """

    def __init__(
        self,
        dataset: typing.Any,
        dataset_path: str | os.PathLike | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        cp = config.context_parallel_size or 1
        self._pad_multiple = 2 * cp if cp > 1 else 1
        _check_config_of_sft(config, self._pad_multiple)
        if num_samples:
            with _naming_place(f"{_label_of_dataset(self)}, {index_split.name}"):
                _check_has_tokens(len(self.indices), num_samples, "rows")
        # Unlike in GPTDataset, a pad that is also a special token stays the pad.
        pad = _attribute_of(config.tokenizer, "pad")
        self._has_pad = pad is not None
        self._pad_token_id = pad if self._has_pad else config.tokenizer.eod
        self._has_warned = False  # True once a sample without loss has been reported

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> typing.Any:
        """Open a file of rows: Parquet if its name ends in .parquet, otherwise JSON lines."""
        dataset_path = os.fsdecode(dataset_path)
        if re.search(r"\.(gz|zst|bz2|xz)$", dataset_path, re.IGNORECASE):
            advice = "decompress it first, because each row is read separately"
            raise ValueError(f"{dataset_path}: fine-tuning data must not be compressed; {advice}")
        is_parquet = dataset_path.endswith(".parquet")
        try:
            rows = _ParquetRows(dataset_path) if is_parquet else _JsonlRows(dataset_path)
        except (FileNotFoundError, IsADirectoryError) as error:
            reason = f"{error.strerror}; SFTDataset reads a .jsonl or .parquet file"
            raise OSError(error.errno, reason, error.filename) from None
        if len(rows) > 0:  # reject a file without conversations now, not in the middle of a run
            _conversations_of_row(dataset_path, rows, 0)
        return rows

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: typing.Any) -> int:
        """Return the number of rows in the file."""
        return len(low_level_dataset)

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        if idx is None:
            sample = self[0]
            sample["loss_mask"].zero_()
            return sample
        k = _as_index(idx, len(self), f"samples of {_label_of_dataset(self)}")
        row = int(self.indices[k % len(self.indices)])
        S = self.config.sequence_length
        tokens, targets, is_padding, ends = _pack_conversations(
            self._iter_encoded(row), S, self._pad_token_id, self._pad_multiple
        )
        labels = targets[1:].copy()
        has_loss = labels != _IGNORED
        has_loss &= labels != self._pad_token_id if self._has_pad else ~is_padding[1:]
        if not has_loss.any() and not self._has_warned:
            self._has_warned = True
            name = _label_of_row(_label_of_dataset(self), self.dataset, row)
            _warn(
                f"{name}: this sample has no loss, because none of its {S} labels is learned; "
                "check its assistant messages, or increase sequence_length (reported only once)"
            )
        starts = ends[:-1]
        if len(starts) > S:  # some conversations have no tokens
            starts = sorted(set(starts))
        cu_seqlens = np.full(S + 1, S, np.int32)
        cu_seqlens[: len(starts)] = starts
        # A last conversation without tokens would start in the padding of the one before it.
        position_starts = [start for start in starts if not is_padding[start]]
        sample = {
            "tokens": tokens[:-1].copy(),
            "labels": labels,
            "loss_mask": has_loss.astype(np.float32),
            "position_ids": _positions_from(position_starts, S),
            "cu_seqlens": cu_seqlens,
            "max_seqlen": np.array(np.diff(ends).max(), np.int32),
        }
        return {key: torch.from_numpy(values) for key, values in sample.items()}

    def _iter_encoded(self, row):
        """Yield the tokens and targets of each conversation in a row, as one int64 (2, n)."""
        tokenizer = self.config.tokenizer
        encode = _attribute_of(tokenizer, "tokenize_conversation")
        name = _label_of_dataset(self)
        conversations = _conversations_of_row(name, self.dataset, row)
        with _naming_failure(_label_of_row(name, self.dataset, row), "cannot be tokenized"):
            for conversation in conversations:
                if encode is None:
                    tokens, targets = _encode_conversation(conversation, tokenizer)
                else:
                    options = {"return_target": True, "add_generation_prompt": False}
                    tokens, targets = encode(conversation, **options)
                yield np.stack([np.asarray(tokens, np.int64), np.asarray(targets, np.int64)])


def _check_config_of_sft(config, pad_multiple):
    """Raise ValueError for a config, or a tokenizer in it, that SFTDataset cannot use."""
    for name in ("create_attention_mask", "reset_attention_mask", "reset_position_ids"):
        if getattr(config, name):
            raise ValueError(f"{name} must be False for SFTDataset, which returns cu_seqlens")
    if config.sequence_length % pad_multiple:
        expected = f"a multiple of {pad_multiple} (2 * context_parallel_size)"
        raise ValueError(f"sequence_length: expected {expected}, got {config.sequence_length}")
    _check_tokenizer(config.tokenizer, ["tokenize", "eod"])
    if _attribute_of(config.tokenizer, "tokenize_conversation") is None:
        added = list(config.tokenizer.tokenize(""))
        if len(added) > 0:
            raise ValueError(
                f"tokenizer: it adds the ids {added} to each part of a conversation; build it "
                "without add_special_tokens, or give it a method tokenize_conversation()"
            )


def _label_of_row(name, rows, row):
    """Return what messages call a row: its line in a file of JSON lines, otherwise its number."""
    if isinstance(rows, _JsonlRows):
        return f"{name}, line {rows.line_numbers[row]}"
    return f"{name}, row {row + 1}"


def _conversations_of_row(name, rows, row):
    """Read a row of the file called name.  Return its conversations, each a list of messages."""
    place = _label_of_row(name, rows, row)
    with _naming_failure(place, "cannot be read"):
        content = rows[row]
    conversations = []
    try:
        for message in content["messages"]:
            if message["role"] == "system" or len(conversations) == 0:
                conversations.append([])
            conversations[-1].append(message)
    except (AttributeError, LookupError, TypeError):
        form = '"messages", a list of {"role": ..., "content": ...}'
        raise ValueError(f"{place}: expected {form}, got {content!r:.60}") from None
    if len(conversations) == 0:
        raise ValueError(f'{place}: the list "messages" is empty; remove this row')
    return conversations


def _encode_conversation(conversation, tokenizer):
    """Return the tokens and targets of a conversation, by the template in the drawing above."""
    tokens = []
    targets = []
    for message in conversation:
        _check_message(message)
        role = message["role"]
        content = message["content"]
        if role == "assistant":
            prompt = list(tokenizer.tokenize("assistant: "))
            answer = [*tokenizer.tokenize(content), tokenizer.eod]
        else:
            prompt = list(tokenizer.tokenize(f"{role}: {content}\n"))
            answer = []
        tokens += prompt + answer
        targets += [_IGNORED] * len(prompt) + answer
    return tokens, targets


def _check_message(message):
    """Raise ValueError unless role and content are strings, and no other key has a value."""
    for key in ("role", "content"):
        value = message.get(key)
        if not isinstance(value, str):  # e.g. None, which JSON writes as null
            raise ValueError(f"the {key} of a message must be a string, got {value!r:.60}")
    for key, value in message.items():
        if key not in ("role", "content") and value not in (None, "", [], {}):
            advice = "remove it, or use a tokenizer with a method tokenize_conversation()"
            raise ValueError(f"the message key {key!r} would be lost ({value!r:.60}); {advice}")


def _pack_conversations(encoded, sequence_length, pad_id, pad_multiple):
    """Concatenate conversations, and cut or pad them to the S + 1 positions of a sample.

    encoded has the tokens and targets of each conversation, int64 (2, n).  Each conversation that
    ends before S is padded to a multiple of pad_multiple.  The last position holds padding, as in
    upstream.

    Return tokens and targets, int64 (S+1,), is_padding, bool (S+1,), and a list of the positions at
    which conversations end.  The list begins with 0 and ends with S.
    """
    S = sequence_length
    columns = np.full((2, S + 1), pad_id, np.int64)
    is_padding = np.ones(S + 1, bool)
    ends = [0]
    for conversation in encoded:
        begin = ends[-1]
        kept = conversation[:, : S - begin]
        end = begin + kept.shape[1]
        columns[:, begin:end] = kept
        is_padding[begin:end] = False
        ends.append(_ceil_div(end, pad_multiple) * pad_multiple)
        if ends[-1] >= S:
            break
    ends[-1] = S
    tokens, targets = columns
    return tokens, targets, is_padding, ends


class _Rows:
    """Base class for the rows of a file, read by their indices.

    The file stays open, so it can be read to the end even if a different file is renamed to its
    path.  Unpickling opens the file that is at this path now, and raises DatasetFormatError if its
    fingerprint is different.
    """

    def __init__(self, path):
        self.path = _absolute_path(path)
        self._open()

    def _open(self):
        """Open the file and compute its fingerprint."""
        self._file = open(self.path, "rb")
        weakref.finalize(self, self._file.close)
        status = os.fstat(self._file.fileno())
        self._mtime_ns = status.st_mtime_ns
        ends = self._file.read(4096)
        self._file.seek(max(0, status.st_size - 4096))
        ends += self._file.read(4096)
        self._file.seek(0)
        self._fingerprint = {"size": status.st_size, "ends_crc32": zlib.crc32(ends)}

    def __getstate__(self):
        return vars(self) | {"_file": None}

    def __setstate__(self, state):
        vars(self).update(state)
        was = self._fingerprint
        self._open()
        _check_equal(was, self._fingerprint, f"{self.path} {_REPLACED_AFTER_PICKLE}")  # section 15

    def fingerprint(self):
        """Return the size of the file and a CRC-32 of its first and last 4,096 bytes."""
        return self._fingerprint


class _JsonlRows(_Rows):
    """The rows of a file of JSON lines.  A blank line is not a row."""

    def __init__(self, path):
        super().__init__(path)
        self.row_offsets = array.array("q")  # byte offset of each row; last, the file's size
        self.line_numbers = array.array("q")  # the line of each row, counted from 1
        offset = 0
        for number, line in enumerate(self._file, 1):
            if not line.isspace():
                self.row_offsets.append(offset)
                self.line_numbers.append(number)
            offset += len(line)
        self.row_offsets.append(offset)

    def __len__(self):
        return len(self.line_numbers)

    def __getitem__(self, row):
        begin = self.row_offsets[row]
        size = self.row_offsets[row + 1] - begin  # includes the blank lines after it
        line = _read_bytes(self._file, begin, size, self.path).rstrip()
        if os.fstat(self._file.fileno()).st_mtime_ns != self._mtime_ns:
            advice = "build the dataset again"
            raise ValueError(f"{self.path}: the file was written after it was opened; {advice}")
        return _parse_object(line)


class _ParquetRows(_Rows):
    """The rows of a Parquet file; its column "messages" is kept in memory."""

    def _open(self):
        super()._open()
        parquet = _import_extra("pyarrow.parquet", self.path)
        with _naming_failure(self.path, 'cannot be read as Parquet with a column "messages"'):
            options = {"columns": ["messages"], "page_checksum_verification": True}
            self._messages = parquet.read_table(self._file, **options)["messages"]

    def __getstate__(self):
        return super().__getstate__() | {"_messages": None}

    def __len__(self):
        return len(self._messages)

    def __getitem__(self, row):
        return {"messages": self._messages[row].as_py()}


# ==============================================================================
# 22. Audit
# ==============================================================================
# Question: which documents are in a sample, and which samples read a document?
#
#   trace(dataset, k)         sample k      ->  its spans: which tokens of which documents it holds
#   find(dataset, pair, i)    sequence i    ->  the samples that hold its tokens
#
# Both functions use only the index arrays of section 4, and read no token.  trace() goes down this
# table, as GPTDataset.pieces() does.  find() goes up.
#
#   array            trace() goes from        to                        find() goes back by
#   shuffle_index    sample k                 sample j of the stream    its inverse
#   sample_index     sample j of the stream   positions d .. d'         binary search
#   document_index   positions d .. d'        sequences                 one pass over the array
#
# In a BlendedDataset, two more arrays come first.  Sample i of the blend is sample
# dataset_sample_index[i] of the dataset dataset_index[i].


class Span(typing.NamedTuple):
    """Consecutive tokens of one sequence in one sample.

    path_prefix     the pair.  None: mock data
    sequence        index of the sequence in the pair, from 0
    document        index, in the pair, of the document that the sequence belongs to
    offset          where the span begins in the sequence, in tokens
    length          number of tokens in the span
    byte_offset     where the span begins in the .bin file, in bytes.  None: no file
    sample_offset   where the span begins in the sample, in tokens
    input           the input file that the document comes from.  None: the pair has no record
    input_document  index of the document in this file, from 0; blank lines are not counted
    """

    path_prefix: str | None
    sequence: int
    document: int
    offset: int
    length: int
    byte_offset: int | None
    sample_offset: int
    input: str | None
    input_document: int | None


def trace(dataset: GPTDataset | BlendedDataset, k: int) -> list[Span]:
    """Return the spans of sample k, in order.

    Together, the spans hold the S + x tokens of the sample, or fewer if it is padded.  If a
    subclass changes tokens when it reads them, the spans describe the tokens before the change.

    Raises IndexError if k is out of range, and ValueError for a dataset of a different class.

    >>> config = GPTDatasetConfig(1234, 4, blend=([toy_corpus()], None), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> sizes = [3, 0, 0]
    >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
    >>> train, valid, test = builder.build()
    >>> for span in trace(train, 0):                   # b b b c c: all of bbb, and cc of cccccc
    ...     print(span.sequence, span.offset, span.length, span.byte_offset, span.sample_offset)
    1 0 3 4 0
    2 0 2 7 3
    >>> find(train, train.dataset_path, 2)             # the samples that hold tokens of cccccc
    [0, 1]
    """
    if isinstance(dataset, BlendedDataset):
        i = _as_index(k, len(dataset), "samples of the blend")
        part = dataset.datasets[dataset.dataset_index[i]]
        return trace(part, int(dataset.dataset_sample_index[i]))
    _check_is_gpt_dataset(dataset)
    prefix = dataset.dataset_path
    spans = []
    start = 0
    for sequence, offset, length in dataset.pieces(k):
        if length > 0:
            document, byte, *origin = _locate_in_files(dataset.dataset, sequence, offset)
            spans.append(Span(prefix, sequence, document, offset, length, byte, start, *origin))
            start += length
    return spans


def _locate_in_files(pair, sequence, offset):
    """Return the document, byte_offset, input and input_document of a Span."""
    if not isinstance(pair, IndexedDataset):  # mock data, or a reader that the user wrote
        return sequence, None, None, None
    # If several documents begin at the same sequence, only the last of them has sequences.
    # np.searchsorted() would copy the array first, because its items are unaligned in the file.
    document = bisect.bisect_right(pair.document_indices, sequence) - 1
    byte_offset = int(pair.sequence_pointers[sequence]) + offset * DType.size(pair.dtype)
    record = _record_of(pair)  # section 20
    begins = record.get("begins", [0])
    i = bisect.bisect_right(begins, document) - 1
    if i + 1 == len(begins):  # there is no record, or it names too few documents
        return document, byte_offset, None, None
    name, _ = record["inputs"][i]
    return document, byte_offset, name, document - begins[i]


def find(
    dataset: GPTDataset | BlendedDataset, path_prefix: str | os.PathLike | None, sequence: int
) -> list[int]:
    """Return the sorted indices of the samples that hold at least one token of a sequence.

    path_prefix   path of the pair: the path that the dataset was made with, or any path that leads
                  to the same files.  None: mock data
    sequence      index of the sequence in the pair; -1 is the last
    Cost          O(samples + entries of document_index), with 4 or 8 bytes of memory for each
                  sample; then O(log(samples)) for each epoch, and O(pieces) for each sample found

    Raises IndexError if the pair does not have this sequence, and ValueError if the dataset does
    not read this pair or is of a different class.
    """
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    for part in parts:
        _check_is_gpt_dataset(part)
    of_pair = [d for d, part in enumerate(parts) if _is_pair_of(part, path_prefix)]
    if len(of_pair) == 0:
        names = ", ".join(_label_of_dataset(part) for part in parts)
        reason = f"expected a pair of the dataset ({names}), got {path_prefix}"
        raise ValueError(f"path_prefix: {reason}")
    all_samples = []
    for d in of_pair:
        samples = _samples_of_sequence(parts[d], sequence)
        if isinstance(dataset, BlendedDataset):
            # A blend takes samples 0, 1, 2, ... from a part, in this order, and may stop before the
            # last.
            i_of_k = np.flatnonzero(dataset.dataset_index == d)
            samples = [int(i_of_k[k]) for k in samples if k < len(i_of_k)]
        all_samples += samples
    return sorted(all_samples)


def _check_is_gpt_dataset(dataset):
    """Raise ValueError unless a dataset has the index arrays of section 4."""
    if not isinstance(dataset, GPTDataset):
        name = type(dataset).__name__
        raise ValueError(f"expected a GPTDataset, or a BlendedDataset of GPTDatasets, got {name}")


def _is_pair_of(dataset, path_prefix):
    """Return whether a dataset reads this pair.

    A relative path is resolved against the current folder.
    """
    given = None if path_prefix is None else os.fsdecode(path_prefix)
    opened = getattr(dataset.dataset, "absolute_prefix", dataset.dataset_path)
    if given == dataset.dataset_path or None in (given, opened):
        return given == dataset.dataset_path
    return _files_of_pair(given) == _files_of_pair(opened)


def _files_of_pair(path_prefix):
    """Return the paths of both files of a pair, without symbolic links.  A URL stays as it is."""
    prefix = _absolute_path(path_prefix)
    paths = [get_idx_path(prefix), get_bin_path(prefix)]
    return paths if _is_remote(prefix) else [os.path.realpath(path) for path in paths]


def _samples_of_sequence(dataset, sequence):
    """Return the samples of a GPTDataset that hold a token of a sequence, in any order."""
    i = _as_index(sequence, len(dataset.dataset), f"sequences of {_label_of_dataset(dataset)}")
    shuffle_index = dataset.shuffle_index
    k_of_j = np.empty_like(shuffle_index)  # the inverse of shuffle_index
    k_of_j[shuffle_index] = np.arange(len(shuffle_index), dtype=shuffle_index.dtype)
    starts = dataset.sample_index[:, 0]  # the position at which each sample starts
    positions = np.flatnonzero(dataset.document_index == i)
    # The tokens at a position may be in the samples that start at this position, and in the last
    # sample that starts before it.
    firsts = np.searchsorted(starts, positions) - 1
    ends = np.searchsorted(starts, positions, "right")
    samples = set()
    for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
        samples.update(k_of_j[max(0, first) : end].tolist())
    return [k for k in samples if any(s == i and n > 0 for s, _, n in dataset.pieces(k))]


# ==============================================================================
# 23. The command line
# ==============================================================================
# Question: how is this module used from a shell?
#
#   megatron-min preprocess --input 'books/*.jsonl' --output-prefix books --append-eod --workers 8
#   megatron-min merge      --input books_text_document wiki_text_document --output-prefix all
#   megatron-min inspect    all --tokenizer tokenizer.json
#   megatron-min verify     all books_text_document
#   megatron-min demo
#
#   how a command ends                              exit code
#   without an error                                0
#   an error: one line on stderr                    1
#   invalid arguments: argparse prints the usage    2
#   Ctrl-C (SIGINT)                                 130
#   SIGTERM, which a cluster sends before it kills  143
#   SIGHUP, which a terminal sends when it closes   129
#
# In all these cases the command removes its temporary files and ends its workers.  If a signal
# arrives while Python ignores exceptions, as in __del__, the command runs to its end and then exits
# with the code of the signal.


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code, 0 or 1.

    argv   the arguments, without the name of the program.  None: sys.argv[1:]

    Usage errors, --help and signals raise SystemExit.  In a thread other than the main thread,
    signals are left to the program.
    """
    program = "megatron-min" if argv is not None else _label_of_program()
    args = _make_parser(program).parse_args(argv)
    try:
        with _exit_at_signals(), warnings.catch_warnings():
            warnings.showwarning = _print_warning
            args.run(args)
    except Exception as error:
        message = _message_of(error)
        if isinstance(error, OSError) and error.strerror is not None:  # leave out the errno
            message = f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
        print(f"{program}: {message}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def _exit_at_signals():
    """Raise SystemExit at SIGINT, SIGTERM and SIGHUP, so that finally clauses clean up.

    A signal that is ignored, as nohup arranges for SIGHUP, stays ignored.
    """
    received = []

    def exit_at_signal(number, frame):
        """End the command by raising SystemExit."""
        received.append(number)
        sys.exit(128 + number)  # the code by which a shell reports a signal

    handlers = {}
    try:
        if threading.current_thread() is threading.main_thread():
            hang_up = getattr(signal, "SIGHUP", signal.SIGINT)  # Windows has no SIGHUP
            for number in {signal.SIGINT, signal.SIGTERM, hang_up}:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: set by C code
                    handlers[number] = signal.signal(number, exit_at_signal)
        yield
    except Exception:
        if len(received) == 0:  # otherwise it is a consequence of the signal
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if len(received) > 0:
        sys.exit(128 + received[0])


def _label_of_program():
    """Return how this program was started, without the arguments, such as "python my/data.py"."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = sys.argv[0] if spec is None else f"-m {spec.name}"
    if program.startswith("-m ") or program.endswith(".py"):
        return f"{os.path.basename(sys.executable)} {program}"
    return os.path.basename(program)  # a script, such as the one that pip installs


def _print_warning(message, *details):
    """Print a warning on one line, without the line of code that it points to."""
    print(f"warning: {_message_of(message)}", file=sys.stderr)


def _print_line(line):
    """Print a line to stdout.  Characters that the console cannot show are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        # When Python exits, it tries to write the line once more.  This call discards it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        # The reader of a pipe may end before the command, as in "megatron-min demo | head -1".
        if not isinstance(error, BrokenPipeError):
            raise


def _print_pair(label, dataset):
    """Print a line about a pair: its size, and the tokenizer and eod that its record names."""
    documents = _label_of_count(len(dataset.document_indices) - 1, "document")
    sequences = _label_of_count(len(dataset), "sequence")
    tokens = f"{_label_of_count(dataset.num_tokens, 'token')} ({np.dtype(dataset.dtype)})"
    record = _record_of(dataset)
    if record.get("tokenizer") is not None:
        md5 = str(record["tokenizer"].get("tokenizer.json", ""))
        tokens += f"; {record['tokenizer'].get('class', 'a tokenizer')} {md5[:8]}".rstrip()
    if "append_eod" in record:
        tokens += f", {_LABELS_OF_EOD[record['append_eod']]}"
    _print_line(f"{label}: {documents}, {sequences}, {tokens}")


def _make_parser(program):
    """Return the parser of all commands.  A command's function is in the attribute run."""
    description = "Make, merge and check the .bin/.idx files that Megatron-LM trains on."
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    commands = {}
    for name, run, text in (
        ("preprocess", _run_preprocess, "tokenize JSON Lines files and write .bin/.idx pairs"),
        ("merge", _run_merge, "join pairs of the same dtype into one pair"),
        ("inspect", _run_inspect, "show the size and the first tokens of a pair"),
        ("verify", _run_verify, "check every entry of the .idx of one or more pairs"),
        ("demo", _run_demo, "run a short end-to-end example, from text to a resumed run"),
    ):
        commands[name] = subparsers.add_parser(name, help=text, description=text)
        commands[name].set_defaults(run=run, program=program)

    several = {"nargs": "+", "action": "extend"}  # a flag that is repeated adds values
    switch = {"action": "store_true"}
    # PREFIX.idx is accepted, too, because this is what a shell completes.
    pair = {"type": _without_ending, "metavar": "PREFIX"}
    output = {"required": True, "metavar": "PREFIX"}
    add = commands["preprocess"].add_argument
    text = 'files, glob patterns or URLs; .gz and .zst are decompressed; "-" is standard input'
    add("--input", required=True, metavar="FILE", help=text, **several)
    add("--output-prefix", help="write PREFIX_KEY_document.bin and .idx for each KEY", **output)
    add("--append-eod", help="end each document with the end-of-document token", **switch)
    add("--json-keys", metavar="KEY", help="keys to tokenize (default: text)", **several)
    add("--split-sentences", help="store each sentence as its own sequence (needs nltk)", **switch)
    add("--workers", type=_parse_workers, default=1, help="number of processes (default: 1)")
    text = "process only shard i of n, where i counts from 0; merge joins the shards"
    add("--shard", type=_parse_shard, default=(0, 1), metavar="i/n", help=text)
    text = "stop at a bad line (the default), or skip it with a warning"
    add("--on-error", choices=("stop", "skip"), default="stop", help=text)
    add("--no-verbose", dest="verbose", action="store_false", help="hide progress and summary")

    add = commands["merge"].add_argument
    add("--input", required=True, help="pairs to join, in this order", **several, **pair)
    add("--output-prefix", help="prefix of the new pair", **output)
    add("--multimodal", help="keep the modes (one number for each sequence)", **switch)

    text = "path or URL of a pair, with or without the ending .bin or .idx"
    commands["inspect"].add_argument("prefix", help=text, **pair)
    commands["verify"].add_argument("prefix", nargs="+", help=text, **pair)
    for name in ("preprocess", "inspect"):
        add = commands[name].add_argument
        add("--tokenizer", default="bytes", help=f"one of {_TOKENIZER_NAMES} (default: bytes)")
        text = "text of the end-of-document token in a tokenizer.json (default: the eos_token of "
        text += "the folder's tokenizer_config.json, otherwise <|endoftext|> or </s>)"
        add("--eod-token", metavar="TOKEN", help=text)
        text = "add the special tokens of a tokenizer.json, such as BOS, to each text"
        add("--add-special-tokens", help=text, **switch)
    return parser


def _parse_shard(text):
    """Parse the value of --shard: "3/16" -> (3, 16)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"expected i/n, such as 0/16 to 15/16, got {text!r}")
    return int(match[1]), int(match[2])


def _parse_workers(text):
    """Parse the value of --workers: "8" -> 8."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _run_preprocess(args):
    prefixes = preprocess(
        args.input,
        args.output_prefix,
        build_tokenizer(args.tokenizer, args.eod_token, args.add_special_tokens),
        append_eod=args.append_eod,
        json_keys=["text"] if args.json_keys is None else args.json_keys,
        split_sentences=args.split_sentences,
        workers=args.workers,
        shard=args.shard,
        on_error=args.on_error,
        verbose=args.verbose,
    )
    for prefix in prefixes.values():
        _print_pair(prefix, IndexedDataset(prefix))


def _run_merge(args):
    merge(args.input, args.output_prefix, args.multimodal)
    _print_pair(args.output_prefix, IndexedDataset(args.output_prefix))


def _run_inspect(args):
    tokenizer = build_tokenizer(args.tokenizer, args.eod_token, args.add_special_tokens)
    dataset = IndexedDataset(args.prefix, check=True)
    _print_pair(args.prefix, dataset)
    if len(dataset) == 0:
        return
    lengths = dataset.sequence_lengths
    mean = dataset.num_tokens / len(dataset)
    _print_line(f"sequences: {lengths.min():,} to {lengths.max():,} tokens, {mean:,.1f} on average")
    tokens = dataset.get(0, 0, min(16, int(lengths[0]))).tolist()
    _print_line(f"first tokens: {tokens}")
    records = {"this command's": {"tokenizer": _identifiers_of(tokenizer)}}
    records[args.prefix] = _record_of(dataset)
    advice = "name the tokenizer of the pair with --tokenizer"
    _, difference = _try_call(_common_tokenizer, records, advice)
    are_ids = all(isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in tokens)
    if difference is None and are_ids:
        _print_line(f"as text: {tokenizer.detokenize(tokens)!r}")
    else:
        reason = f"some of these tokens are not ids of the tokenizer {args.tokenizer}; {advice}"
        _print_line(f"not decoded: {difference or reason}")


def _run_verify(args):
    for prefix in args.prefix:
        _print_pair(f"OK: {prefix}", IndexedDataset(prefix, check=True))


def _run_demo(args):
    with tempfile.TemporaryDirectory() as folder:
        _print_line("1. Text to tokens: a token is a byte, or eod, which ends a document")
        texts = []
        for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:150]:
            code = path.read_text("utf-8", errors="replace")
            docs = "".join(re.findall('"""(.+?)"""', code, re.DOTALL))
            texts.append({"code": code, "docs": docs})
        demo = os.path.join(folder, "demo")
        pairs = preprocess(None, demo, texts=texts, append_eod=True, json_keys=["code", "docs"])
        for prefix in pairs.values():
            _print_pair(f"   {os.path.basename(prefix)}", IndexedDataset(prefix))

        blend = [pairs["code"], pairs["docs"]], [70, 30]
        config = GPTDatasetConfig(1234, 256, blend=blend, split="1", tokenizer=ByteTokenizer())
        builder = BlendedMegatronDatasetBuilder(GPTDataset, [600, 0, 0], lambda: True, config)
        train, _, _ = builder.build()
        code, docs = train.samples_taken()
        _print_line(f"2. A blend: {len(train)} samples of 256 tokens, {code} code, {docs} docs")

        loader = build_pretraining_data_loader(train, 0, micro_batch_size=8)
        batches = iter(loader)
        for _ in range(5):
            batch = next(batches)
        text = ByteTokenizer().detokenize(batch["tokens"][0])
        _print_line(f"3. A loader: stopped after 5 batches of 8 samples, at {text[:32]!r}")

        resumed = build_pretraining_data_loader(train, 0, micro_batch_size=8)
        resumed.load_state_dict(loader.state_dict())
        pairs = zip(batches, resumed, strict=True)
        same = [torch.equal(batch["tokens"], again["tokens"]) for batch, again in pairs]
        end = f"identical to an uninterrupted run: {all(same)}"
        _print_line(f"4. Resumed: {len(same)} batches, {end}")
    _print_line('Next, try your own text.  Write one line {"text": "..."} for each document to')
    _print_line("corpus.jsonl, and run:")
    _print_line(
        f"{args.program} preprocess --input corpus.jsonl --output-prefix corpus --append-eod"
    )


if __name__ == "__main__":
    sys.exit(main())
