import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version():
    # Read, not imported: importing mixhead_plugin needs torch, which may not be installed yet.
    source = (ROOT / "mixhead_plugin" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", source, re.MULTILINE)
    if found is None:
        raise RuntimeError("mixhead_plugin/__init__.py: no line __version__ = '...'")
    return found.group(1)


def readme():
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="mixhead_plugin",
    version=version(),
    description="Mixhead, fixed head size, sigsoftmax and L2-normalised attention as a fairseq plugin",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="the mixhead_plugin authors",
    license="MIT",
    packages=find_packages(include=["mixhead_plugin", "mixhead_plugin.*"]),
    # Derivations stand beside the code that cites them; analysis/page.* make the page of `view`.
    package_data={"mixhead_plugin": ["**/*.md", "analysis/page.*"]},
    python_requires=">=3.11",
    # mixhead_plugin.ops and mixhead_plugin.nn need nothing but torch.
    install_requires=["torch>=2.6"],
    extras_require={
        # What fairseq needs for text models. Install fairseq itself by `pip install --no-deps ve-fairseq`; see
        # docs/install.md. Its metadata demand torchaudio, which text models do not use and which brings another torch.
        "fairseq": [
            "bitarray",
            "cffi",
            "hydra-core==1.3.2",
            "numpy",
            "omegaconf==2.3.0",
            "packaging",
            "regex",
            "sacrebleu",
            "scikit-learn",
            "tqdm",
        ],
        "hf": ["accelerate", "transformers>=5.3"],  # mixhead_plugin.hf; accelerate is for the Trainer
        "test": ["pytest", "ruff"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: MIT License",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
    ],
    entry_points={"console_scripts": ["mixhead = mixhead_plugin.__main__:main"]},
    zip_safe=False,  # fairseq takes --user-dir as a folder
)
