# Images of the server, for a CPU and for NVIDIA GPUs (docs/deploy.md):
#   docker build --target cpu -t jaxinfer:cpu .
#   docker build --target cuda -t jaxinfer:cuda .
# and for the pods of Ray Serve (docs/ray.md):
#   docker build --target ray -t jaxinfer:ray .

FROM python:3.12-slim AS build
# The compiler of the native kernels; the images below do not contain it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/jaxinfer
ENV PATH=/opt/jaxinfer/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY LICENSE README.md constraints.txt pyproject.toml setup.py ./
COPY configs configs
COPY jaxinfer jaxinfer
COPY pallas_kernels pallas_kernels
RUN pip install -c constraints.txt '.[otel,events]'

FROM build AS build-cuda
# JAX's packages bring the CUDA libraries; only the driver comes from the host.
RUN pip install -c constraints.txt '.[cuda13]'

FROM build-cuda AS build-ray
RUN pip install -c constraints.txt '.[ray]'

FROM python:3.12-slim AS run
RUN groupadd --gid 10001 jaxinfer \
    && useradd --uid 10001 --gid jaxinfer --create-home jaxinfer \
    && install --directory --owner jaxinfer --group jaxinfer /cache
# Downloaded models and compiled executables: keep this folder in a volume.
ENV PATH=/opt/jaxinfer/bin:$PATH JAXINFER_CACHE_DIR=/cache HF_HOME=/cache/huggingface \
    JAXINFER_PORT=8000
# Docker publishes ports of the container's own interface, not of its loopback one.
ENV JAXINFER_HOST=0.0.0.0
VOLUME /cache
EXPOSE 8000
USER jaxinfer
WORKDIR /home/jaxinfer
# /health waits up to 10 s for the engine; while the model is loaded, every route answers 503.
HEALTHCHECK --interval=30s --timeout=15s --retries=3 --start-period=15m \
    CMD ["python", "-c", "import http.client, os, sys; client = http.client.HTTPConnection('127.0.0.1', int(os.environ['JAXINFER_PORT']), timeout=14); client.request('GET', '/health'); sys.exit(client.getresponse().status != 200)"]
ENTRYPOINT ["jaxinfer", "serve"]

FROM run AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/jaxinfer /opt/jaxinfer

FROM run AS ray
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-ray /opt/jaxinfer /opt/jaxinfer
# KubeRay starts `ray` in a shell, and its probes call wget.
USER root
RUN apt-get update \
    && apt-get install --yes --no-install-recommends wget \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s /opt/jaxinfer/bin/ray /usr/local/bin/ray
USER jaxinfer
HEALTHCHECK NONE
ENTRYPOINT []

FROM run AS cpu
COPY --from=build /opt/jaxinfer /opt/jaxinfer
