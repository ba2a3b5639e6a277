# fairseq with this plugin on a CPU. docs/install.md has the commands.
#
# On x86_64 fairseq comes as a wheel, so no compiler is needed. On another machine it is built from source: install g++ first.
FROM python:3.12-slim

WORKDIR /mixhead
COPY . .
# The pinned torch, without CUDA.
RUN TORCH="2.13.0 --index-url https://download.pytorch.org/whl/cpu" scripts/setup.sh
ENV PATH=/mixhead/.venv/bin:$PATH

# Data and checkpoints lie outside of the image: -v "$PWD:/work".
WORKDIR /work
CMD ["mixhead", "check"]
