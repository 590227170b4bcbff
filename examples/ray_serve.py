"""Two replicas on Ray Serve, behind one address (extra ``ray``; `docs/ray.md` has more)."""

import json
from urllib.request import Request, urlopen

from ray import serve

from jaxinfer.ray import build_app

app = build_app(
    {
        "model": "smollm2-135m-instruct",  # any setting of `jaxinfer serve`
        "max_model_len": 2048,
        # Ray's options of the model's deployment; without num_gpus a replica takes a GPU
        "deployment": {
            "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
            "autoscaling_config": {"min_replicas": 2, "max_replicas": 4},
        },
    }
)

if __name__ == "__main__":
    serve.run(app)
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"messages": [question], "temperature": 0}).encode()
    request = Request(
        "http://127.0.0.1:8000/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urlopen(request) as response:
        print(json.load(response)["choices"][0]["message"]["content"])
    serve.shutdown()
