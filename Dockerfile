# Images of `stemma`; their entry point is the command line.
#   docker build -t stemma:0.1.0 .                          for CPUs
#   docker build -t stemma:0.1.0-gpu --target gpu .         for NVIDIA's GPUs
# torch comes from pip's usual index, with what it brings for CUDA. For a smaller image for CPUs name an index with a
# build for them alone: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PYTHON=3.11.14-slim-bookworm
FROM python:${PYTHON} AS build
# Compiles the kernels into the wheel; stays out of the image that runs. Any version of g++ will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt ./
RUN python -m venv /opt/stemma \
    && /opt/stemma/bin/pip install --no-cache-dir -c constraints.txt "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src ./src
COPY packages ./packages
# Extras of the router, separated by commas: ray for replicas on Ray Serve, envoy for the endpoint picker.
ARG EXTRAS=
RUN /opt/stemma/bin/pip wheel --no-cache-dir --no-deps -w /wheels . ./packages/mindie ./packages/router ./packages/lab ./packages/batch ./packages/receipts \
    && /opt/stemma/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/stemma/bin/pip install --no-cache-dir -c constraints.txt "stemma-router[${EXTRAS}]" stemma-mindie stemma-lab stemma-batch stemma-receipts \
    && test -n "$(find /opt/stemma -path '*/stemma/native/prebuilt/*.so')"

FROM python:${PYTHON} AS base
# The kernels' threads (OpenMP). Any version will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin stemma \
    && install -d -o 10001 -g 10001 /var/cache/stemma
COPY --from=build /opt/stemma /opt/stemma
ENV PATH=/opt/stemma/bin:$PATH HOME=/tmp HEALTH_URL=http://127.0.0.1:8000/health
EXPOSE 8000 8080
# Another port, or `stemma route`: HEALTH_URL. A server that loads its weights has ten minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
    CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(os.environ['HEALTH_URL'], timeout=4)"]
ENTRYPOINT ["stemma"]
CMD ["--help"]

FROM base AS gpu
# Triton has a C compiler make what starts its kernels. The driver's libraries come from the host.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001

# The last stage is the one that is built when none is named.
FROM base AS cpu
USER 10001:10001
