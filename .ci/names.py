#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write README's table of upstream's names: where is ours, in which section and line?

    python .ci/names.py            write the table between its two markers in README.md
    python .ci/names.py --check    exit with 1 if the table is not of this module
"""

import argparse
import ast
import pathlib
import re
import sys

TREE = pathlib.Path(__file__).resolve().parent.parent
BEGIN = "<!-- names: begin -->\n"
END = "<!-- names: end -->\n"
HEAD = "| upstream | here | section | line |\n|---|---|--:|--:|\n"
BATCH_READER = "PretrainingDataLoader"
NOT_GPT = "not here: not of GPT data"
STORAGE = "not here: object storage"

# One line for each name: the name of upstream, and ours after "=", if it is another one.  A text in
# brackets says why we have none; it counts only while megatron_min.py has no such name.  A line
# that ends in ":" is a module or a script of upstream.
NAMES = f"""
megatron.core.datasets.indexed_dataset:
DType
IndexedDataset
IndexedDatasetBuilder
get_idx_path
get_bin_path
_IndexReader = _read_index
_IndexWriter = IndexedDatasetBuilder.finalize
_BinReader = TokenSource
_MMapBinReader = MappedTokens
_FileBinReader = FileTokens
_S3BinReader ({STORAGE})
_MultiStorageClientBinReader ({STORAGE})
"""
