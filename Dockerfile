# marsrl with one of the two locked sets, for CPUs or NVIDIA GPUs (docs/install.md, "In a container"):
#   docker build -t marsrl:cpu .
#   docker build -t marsrl:cuda --build-arg DEVICE=cuda --build-arg BASE=ubuntu:24.04 .
# BASE must be Debian or Ubuntu with Python 3.12 (for CPUs also 3.11). The set includes CUDA's libraries, but not the host's driver.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# g++ and Python.h are needed at run time too: vLLM and torch.compile use g++ on CPUs, Triton gcc and Python.h on GPUs.
# --non-unique, because Ubuntu already has a user 1000.
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates g++ make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --non-unique --uid 1000 marsrl \
    && install -d -o marsrl /opt/marsrl
USER marsrl
WORKDIR /opt/marsrl
ENV PATH=/opt/marsrl/.venv/bin:$PATH HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
    RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1

# The libraries are in a separate layer, which is reused if only marsrl changes.
ARG DEVICE=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --chown=marsrl constraints/cpu.txt constraints/cuda.txt constraints/
RUN python3 -m venv .venv \
    && if [ "$DEVICE" = cpu ]; then index="--extra-index-url $TORCH_INDEX"; fi \
    && pip install --no-cache-dir --no-deps $index -r "constraints/$DEVICE.txt"

COPY --chown=marsrl . .
# The stamp tells make that .venv is complete.
RUN MARSRL_BUILD=require pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && echo "$DEVICE" >.venv/.installed

# There is no HEALTHCHECK: training is not a service, and a check that imports PyTorch every few seconds would slow it down.
CMD ["marsrl", "doctor"]
