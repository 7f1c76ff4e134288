# SGLang's image with this package: docker build -t sglang-prefixpack .
# Another release or CUDA version: --build-arg SGLANG_IMAGE=lmsysorg/sglang:TAG (SGLang 0.5.14 to 0.5.23)
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.16

FROM ${SGLANG_IMAGE} AS build
# The image has nvcc. PTX of compute_80 is for GPUs after Hopper with enough shared memory.
ARG PREFIXPACK_CUDA_ARCHS="80+PTX;86;89;90a;120"
COPY . /src
WORKDIR /src
RUN PREFIXPACK_CUDA=1 python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${SGLANG_IMAGE}
COPY --from=build /wheels /wheels
RUN python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && rm -r /wheels \
    && python3 -c "import sgl_prefix_attn._native"
# Stock backends keep their names and run wrapped; servers that cannot run packed get SGLang's own.
ENV PREFIXPACK_WRAP=1
EXPOSE 30000
CMD ["python3", "-m", "sglang.launch_server", "--help"]
