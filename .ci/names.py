#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Write README's table of upstream's names: where is ours, in which section and line?

python .ci/names.py            write the table between its two markers in README.md
python .ci/names.py --check    only see whether it is that of megatron_min.py; exit with 1 if not
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

# A line with a colon at its end is a module or a script of upstream.  Every other line is a name in
# it; ours comes after "=", if ours is called otherwise.  Where megatron_min.py has no such name,
# the text in brackets says why.
NAMES = """
megatron.core.datasets.indexed_dataset:
    DType
    IndexedDataset
    IndexedDataset.get
    IndexedDataset.get_document_indices
    IndexedDataset.exists
    IndexedDatasetBuilder
    IndexedDatasetBuilder.add_item
    IndexedDatasetBuilder.add_document
    IndexedDatasetBuilder.end_document
    IndexedDatasetBuilder.add_index
    IndexedDatasetBuilder.finalize
    get_idx_path
    get_bin_path
    _IndexReader = IndexedDataset
    _IndexWriter = IndexedDatasetBuilder.finalize
    _BinReader = TokenSource
    _MMapBinReader = MappedTokens
    _FileBinReader = FileTokens
    _S3BinReader = RemoteTokens (object storage)
    _MultiStorageClientBinReader = RemoteTokens (object storage)
megatron.core.datasets.object_storage_utils:
    ObjectStorageConfig (object storage)
    is_object_storage_path = is_remote (object storage)
    cache_index_file = fetch_index (object storage)
    dataset_exists = IndexedDataset.exists
    S3Config = ObjectStorageConfig (object storage)
    S3Client (a type for annotations)
    get_index_cache_path = fetch_index (object storage)
    parse_s3_path (fsspec does this)
    get_object_storage_access (fsspec does this)
megatron.core.datasets.utils:
    Split
    normalize
    get_blend_from_list
    compile_helpers (C is built when the package is installed)
megatron.core.datasets.blended_megatron_dataset_config:
    BlendedMegatronDatasetConfig
    parse_and_normalize_split
    convert_split_vector_to_split_matrix
megatron.core.datasets.megatron_dataset:
    MegatronDataset
    MegatronDataset.build_low_level_dataset
    MegatronDataset.numel_low_level_dataset
    MegatronDataset._key_config_attributes
megatron.core.datasets.gpt_dataset:
    GPTDatasetConfig
    GPTDataset
    GPTDataset._query_document_sample_shuffle_indices
    GPTDataset._build_document_sample_shuffle_indices
    GPTDataset._get_num_tokens_per_epoch = GPTDataset.tokens_per_epoch
    GPTDataset._get_num_epochs = plan_epochs
    MockGPTLowLevelDataset
    MockGPTDataset
    _build_document_index = build_document_index
    _build_shuffle_index = build_shuffle_index
    _get_ltor_masks_and_position_ids = GPTDataset.__getitem__
megatron.core.datasets.helpers:
    build_sample_idx
megatron.core.datasets.helpers_cpp:
    build_sample_idx_int32 = build_sample_idx
    build_sample_idx_int64 = build_sample_idx
    build_blending_indices
    build_exhaustive_blending_indices
    build_mapping (BERT and T5)
    build_blocks_mapping (retrieval)
megatron.core.datasets.blended_dataset:
    BlendedDataset
    BlendedDataset._build_indices
megatron.core.datasets.blended_megatron_dataset_builder:
    BlendedMegatronDatasetBuilder
    BlendedMegatronDatasetBuilder.build
    BlendedMegatronDatasetBuilder.build_generic_dataset = on_every_rank
megatron.core.datasets.megatron_tokenizer:
    MegatronLegacyTokenizer (any object with the methods of section 2 will do)
megatron.core.datasets.multimodal_dataset:
    MultimodalDatasetConfig (multimodal samples)
    MockMultimodalDataset (multimodal samples)
megatron.core.datasets.data_schedule:
    HybridCPDataLoaderWrapper (hybrid context parallel)
megatron.core.rerun_state_machine:
    RerunDataIterator
megatron.core.num_microbatches_calculator:
    NumMicroBatchesCalculator = NumMicroBatches
    ConstantNumMicroBatchesCalculator = NumMicroBatches
    RampupBatchsizeNumMicroBatchesCalculator = NumMicroBatches
    get_num_microbatches = NumMicroBatches.get
    get_current_global_batch_size = NumMicroBatches.get_current_global_batch_size
    update_num_microbatches = NumMicroBatches.update
megatron.core.parallel_state:
    RankGenerator = ParallelGroups.rank_lists
    initialize_model_parallel = ParallelGroups
    get_data_parallel_group = ParallelGroups.group
    get_data_parallel_rank = ParallelGroups.rank
    get_data_parallel_world_size = ParallelGroups.size
    is_pipeline_first_stage = ParallelGroups.is_first_stage
    is_pipeline_last_stage = ParallelGroups.is_last_stage
megatron.core.utils:
    get_batch_on_this_cp_rank
megatron.core.distributed:
    DistributedDataParallel
    DistributedDataParallel.no_sync
    DistributedDataParallel.start_grad_sync
    DistributedDataParallel.finish_grad_sync
    DistributedDataParallel.zero_grad_buffer
    DistributedDataParallel.scale_gradients
    DistributedDataParallel.broadcast_params
    finalize_model_grads
megatron.core.distributed.param_and_grad_buffer:
    _ParamAndGradBucket = Bucket
megatron.core.pipeline_parallel.schedules:
    forward_backward_no_pipelining
megatron.training:
    MegatronPretrainingSampler
    MegatronPretrainingRandomSampler
    build_pretraining_data_loader
    cyclic_iter
    get_train_valid_test_num_samples
    get_batch_on_this_tp_rank
    check_data_consistency
    SFTDataset
    NullTokenizer
pretrain_gpt.py:
    get_batch
tools:
    preprocess_data.py = preprocess
    merge_datasets.py = merge
"""


def read_names():
    """NAMES -> [(module, name of upstream, our name, why there is none), ...]"""
    rows = []
    module = None
    for line in NAMES.split("\n"):
        if line.endswith(":"):
            module = line[:-1]
        elif line:
            names, _, reason = line.strip().partition(" (")
            upstream, _, ours = names.partition(" = ")
            rows.append((module, upstream, ours or upstream, reason.removesuffix(")")))
    return rows


def places_of(source):
    """The text of megatron_min.py -> {name: (section, line)} of functions, classes, methods."""
    section = None
    section_of_line = [None]  # lines are counted from 1
    for line in source.split("\n"):
        banner = re.fullmatch(r"# (\d+)\. .+", line)
        if banner:
            section = banner[1]
        section_of_line.append(section)
    definitions = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    definitions.setdefault(f"{node.name}.{part.name}", part)
    places = {}
    for name, node in definitions.items():
        places[name] = section_of_line[node.lineno], node.lineno
    return places


def table_of(source):
    """The table of all names, as Markdown."""
    places = places_of(source)
    lines = [HEAD]
    last_module = None
    for module, upstream, ours, reason in read_names():
        if module != last_module:
            lines.append(f"| **{module}** | | | |\n")
            last_module = module
        if ours in places:
            section, line = places[ours]
            link = f"[{line}](megatron_min.py#L{line})"
            lines.append(f"| `{upstream}` | `{ours}` | {section} | {link} |\n")
        elif reason:
            lines.append(f"| `{upstream}` | not here: {reason} | | |\n")
        else:
            raise ValueError(f"megatron_min.py has no {ours}: mend NAMES in .ci/names.py")
    return "".join(lines)


def with_table(readme, source):
    """README's text with the table of this module between the markers."""
    before, found, rest = readme.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"README.md wants the lines {BEGIN!r} and {END!r}")
    return before + BEGIN + "\n" + table_of(source) + "\n" + END + after


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    path = TREE / "README.md"
    readme = path.read_text(encoding="utf-8")
    wanted = with_table(readme, (TREE / "megatron_min.py").read_text(encoding="utf-8"))
    if options.check and wanted != readme:
        sys.exit("README's table of names is not of this module: run python .ci/names.py")
    if not options.check:
        path.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
