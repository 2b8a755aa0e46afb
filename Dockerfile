# ROCm image with torch and the package built from this tree.
#
#   docker build -t flash_attn_rocm .
#   docker run --device /dev/kfd --device /dev/dri --group-add video -it \
#       flash_attn_rocm
#
# ROCm 6.3 is the default because the torch builds for it still serve gfx906.
# SPDX-License-Identifier: BSD-3-Clause
ARG ROCM_IMAGE=rocm/dev-ubuntu-22.04:6.3.4

FROM ${ROCM_IMAGE} AS build
ARG FA_ARCHS=gfx906
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# Versions are the base image's business: its package lists pin them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev python3-pip \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# ROCm's clang under /opt/rocm compiles the kernels.
RUN FA_ARCHS="${FA_ARCHS}" python3 -m pip wheel --no-cache-dir --no-deps -w /wheels .

FROM ${ROCM_IMAGE}
ARG TORCH=2.9.1
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/rocm6.3
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-pip \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --no-cache-dir --index-url "${TORCH_INDEX_URL}" "torch==${TORCH}"
COPY --from=build /wheels /wheels
RUN python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && python3 -c "import flash_attn_rocm; print(flash_attn_rocm.build_info())"
RUN useradd --create-home --uid 1000 --groups video user
USER 1000
WORKDIR /home/user
CMD ["python3"]
