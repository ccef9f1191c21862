"""Builds megatron-min: megatron_min.py and, where a C compiler is found, _helpers.c for speed.

pip install .                          uses C if it compiles, else says so and goes without
MEGATRON_MIN_C=1 pip install .         a build without C is an error (CI, wheels)
MEGATRON_MIN_C=0 pip install .         no compiler is called
python setup.py build_ext --inplace    puts _megatron_min beside the sources
MEGATRON_MIN_CFLAGS="-O1 -g -fsanitize=address,undefined"    further compiler and linker flags

A wheel with C is for one platform and all Pythons from 3.11 on (cp311-abi3); one without C is pure
(py3-none-any).
"""

import os
import re
import shlex
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1: a wheel's tag says what was tried
    bdist_wheel = None

HERE = Path(__file__).resolve().parent
SOURCE = (HERE / "megatron_min.py").read_text(encoding="utf-8")
README = HERE / "README.md"
C_WANTED = os.environ.get("MEGATRON_MIN_C", "")  # "0" never, "1" or fail, else if it can be had
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free threads: no limited API

BANNER = f"""
{"*" * 88}
_megatron_min WAS NOT BUILT: {{}}

megatron_min works without it, with equal results, but slower.  It needs a C compiler and
Python's headers; MEGATRON_MIN_C=1 makes this an error, =0 leaves it out silently.
{"*" * 88}
"""


class BuildIfPossible(build_ext):
    """A build that fails is a loud note, not an error, unless MEGATRON_MIN_C=1 asks for it."""

    def run(self):
        self.force = True  # other flags make another file
        try:
            super().run()
        except Exception as error:
            if C_WANTED == "1":
                raise
            for ext in self.extensions:  # an older one's must not pass for this one's
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.extensions = []
            self.distribution.ext_modules = []
            print(BANNER.format(error), file=sys.stderr, flush=True)

    def build_extension(self, ext):
        """Blends are rounded as IEEE says: no fused multiply-add, whatever else is asked for."""
        own = shlex.split(os.environ.get("MEGATRON_MIN_CFLAGS", ""))
        if self.compiler.compiler_type == "msvc":
            ext.extra_compile_args = ["/O2", *own, "/fp:precise"]
        else:
            ext.extra_compile_args = ["-O3", *own, "-ffp-contract=off"]
        ext.extra_link_args = own
        super().build_extension(ext)


class CompleteSdist(sdist):
    """Everything that a packager needs to build and to test, with C or without."""

    def make_distribution(self):
        self.filelist.extend(["_helpers.c", "test_megatron_min.py", "bench.py"])
        self.filelist.extend([".pytest.ini", ".ruff.toml"])
        super().make_distribution()


commands = {"build_ext": BuildIfPossible, "sdist": CompleteSdist}

if bdist_wheel is not None:

    class WheelAsBuilt(bdist_wheel):
        """A wheel whose tag says whether C was built."""

        def run(self):
            self.run_command("build_ext")
            self.root_is_pure = not self.distribution.has_ext_modules()
            super().run()

    commands["bdist_wheel"] = WheelAsBuilt

ext_modules = []
if C_WANTED != "0":
    macros = []
    if not LIMITED:
        macros.append(("Py_GIL_DISABLED", "1"))  # what _helpers.c looks at on Windows
    sources = ["_helpers.c"]
    ext_modules.append(
        Extension("_megatron_min", sources, py_limited_api=LIMITED, define_macros=macros)
    )

options = {}
if LIMITED:
    options["bdist_wheel"] = {"py_limited_api": "cp311"}

long_description = ""
if README.exists():
    long_description = README.read_text(encoding="utf-8")

setup(
    name="megatron-min",
    version=re.search(r'^__version__ = "(.+)"$', SOURCE, re.M)[1],
    description="Megatron-LM's GPT data path in one file: text to resumable batches, bit for bit",
    long_description=long_description,
    long_description_content_type="text/markdown",
    license="MIT",
    keywords=["Megatron-LM", "GPT", "pretraining", "dataset", "data loader", "tokenized corpus"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    py_modules=["megatron_min"],
    entry_points={"console_scripts": ["megatron-min = megatron_min:main"]},
    install_requires=["numpy>=1.26", "torch>=2.8"],  # the oldest that were tried
    extras_require={
        "test": ["pytest", "pytest-benchmark", "setuptools>=70.1", "gigatoken", "tokenizers"],
        # of the commands: a tokenizer.json of Hugging Face, and --split-sentences
        "tools": ["gigatoken>=0.10", "nltk>=3.9", "tokenizers"],
        # s3://, http:// and https:// (s3fs needs aiohttp), .parquet, .zst
        "storage": ["pyarrow", "s3fs", "zstandard"],
        "test-storage": ["s3fs", "moto[server]"],  # an S3 server of the tests
        "parity": ["megatron-core==0.16.1"],  # to compare with, in the tests and in bench.py
    },
    ext_modules=ext_modules,
    options=options,
    cmdclass=commands,
)
