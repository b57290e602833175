"""Packaging of flash-tf; what tools read from pyproject.toml is there."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
ABOUT = {}
exec((HERE / "flash_tf" / "__init__.py").read_text(), ABOUT)

AOT = ["jax>=0.10,<0.11", "libtpu>=0.0.51,<0.1"]  # compile exported steps for TPU on a CPU host, or run them on a GPU
DOCS = ["mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.27"]
NOTEBOOKS = ["nbclient>=0.10", "ipykernel>=6"]  # run them

setup(
    name="flash-tf",
    version=ABOUT["__version__"],
    description="FLASH, GAU and other linear-time Transformers in TensorFlow and Keras",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",  # Keras 3.15 and JAX refuse 3.10; TensorFlow 2.20 has no wheel for 3.14
    packages=find_packages(include=["flash_tf*", "kernels_xla*"]),
    package_data={"flash_tf": ["configs/*.yaml", "configs/*/*.yaml"]},
    entry_points={"console_scripts": ["flash-tf = flash_tf.cli:program"]},
    install_requires=[
        # 2.20 is what a plain install gives, and the last that tf-models-official follows; 2.19.1 is the last with
        # Cloud TPU support
        "tensorflow>=2.19,<2.21",
        "tensorflow-text>=2.19,<2.21",  # its operators are built against one minor version of TensorFlow
        "tf-models-official>=2.19,<2.21",  # for orbit alone; a release for each minor version of TensorFlow
        "tf-keras<2.21",  # orbit imports it; 2.21 needs TensorFlow 2.21
        "keras>=3.12,<3.16",  # ReversibleEmbedding came with 3.12; 3.16 is untested
        "tensorflow-datasets>=4.9.9",  # the releases that the reader was tried with
        "importlib_resources",  # tensorflow-datasets imports it, and declares it for Python 3.8 only
        "numpy<2.6",  # 2.6 is untested
        "sentencepiece>=0.2,<0.3",  # trains tokenizers; 0.3 may change them
        "setuptools>=69,<82",  # tensorboard 2.20, which tensorflow brings, imports pkg_resources; 82 has it no more
        "PyYAML",
        "matplotlib>=3.8",  # flash-tf plot and inspect: a small part of what TensorFlow takes, and no second install
    ],
    extras_require={
        "gpu": ["tensorflow[and-cuda]>=2.19,<2.21"],  # CUDA libraries as wheels
        "gcs": ["tensorflow-io-gcs-filesystem"],  # gs:// paths, optional in TensorFlow since 2.20
        "aot": AOT,
        "docs": DOCS,
        "dev": ["ruff>=0.14", "import-linter>=2", "pytest>=8", "pytest-xdist>=3", *AOT, *DOCS, *NOTEBOOKS],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
