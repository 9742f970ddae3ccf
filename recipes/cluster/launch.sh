#!/usr/bin/env bash
# Train by a cluster recipe: recipes/cluster/launch.sh mapd|grpo [key=value ...]
#
# DATA_DIR   folder with train.parquet and test.parquet            (default: data)
# PROTOCOLS  protocol cache                                        (default: data/protocols.sqlite)
# CORPUS     what the protocols must be of, a file or sha256:HASH  (default: not compared)
# MODEL      Hugging Face name or folder                           (default: Qwen/Qwen3-1.7B)
# RETRIEVER  comma-separated URLs of Search-R1 compatible servers  (default: http://127.0.0.1:8000)
# NNODES, GPUS_PER_NODE                                            (default: 1, 8)
# RAY_ADDRESS of a running Ray cluster; unset starts one on this machine.
set -euo pipefail

recipe=${1:?usage: recipes/cluster/launch.sh mapd|grpo [key=value ...]}
shift
retriever=${RETRIEVER:-http://127.0.0.1:8000}
export DATA_DIR=${DATA_DIR:-data} PROTOCOLS=${PROTOCOLS:-data/protocols.sqlite} MODEL=${MODEL:-Qwen/Qwen3-1.7B}

# A search service that is down costs a whole rollout to notice.
for url in ${retriever//,/ }; do
  curl -sf --max-time 30 -H 'Content-Type: application/json' -o /dev/null \
    -d '{"queries": ["probe"], "topk": 1, "return_scores": true}' "$url/retrieve" \
    || { echo "launch.sh: error: no retrieval service answers at $url/retrieve" >&2; exit 2; }
done

exec mapd train "$(dirname "${BASH_SOURCE[0]}")/$recipe.yaml" \
  "mapd.agent.retriever_urls=[$(printf "'%s'," ${retriever//,/ } | sed 's/,$//')]" \
  "trainer.nnodes=${NNODES:-1}" "trainer.n_gpus_per_node=${GPUS_PER_NODE:-8}" "$@"
