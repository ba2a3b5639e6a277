# fairseq with this plugin on an NVIDIA GPU. docs/install.md has the commands.
#
# The pinned torch brings its own CUDA libraries. The machine needs NVIDIA's driver and container toolkit.
FROM python:3.12-slim

# triton compiles the call of each kernel when it is first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /mixhead
COPY . .
RUN scripts/setup.sh
ENV PATH=/mixhead/.venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Data and checkpoints lie outside of the image: -v "$PWD:/work".
WORKDIR /work
CMD ["mixhead", "check"]
