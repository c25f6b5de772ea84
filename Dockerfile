# An image with the suite and everything that it needs; it runs without a network, with models and data in mounted folders.
#
#   docker build -t dschat .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD/output:/home/dschat/dschat/output" dschat bash scripts/quickstart.sh
#
# For CPUs: --build-arg BASE=ubuntu:24.04, and --build-arg PIP_EXTRA_INDEX_URL=... with an index of CPU builds of torch,
# which saves gigabytes. EXTRAS are those of scripts/install.sh: --build-arg EXTRAS="reasoning lm-eval". BASE has Python
# 3.10 to 3.13; its CUDA needs nvcc and the major version of torch.version.cuda, as DeepSpeed compiles operations.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --shell /bin/bash dschat
USER dschat
WORKDIR /home/dschat/dschat
ENV VENV=/home/dschat/venv

# Only what the installation reads, so that a change of the code does not install everything again.
COPY --chown=dschat requirements.txt constraints.txt setup.py pyproject.toml ./
COPY --chown=dschat dschat/__init__.py dschat/
COPY --chown=dschat scripts/install.sh scripts/
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS=""
RUN PIP_NO_CACHE_DIR=1 bash scripts/install.sh ${EXTRAS}

COPY --chown=dschat . .
# A mounted volume gets the owner of the folder that it covers.
RUN mkdir -p output
ENV PATH=/home/dschat/venv/bin:$PATH TOKENIZERS_PARALLELISM=false
CMD ["bash"]
