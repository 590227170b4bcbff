"""Several prompts at once, as in a script for vLLM."""

from jaxinfer import LLM, SamplingParams

prompts = ["The capital of Japan is", "Water boils at", "Once upon a time"]
llm = LLM("smollm2-135m-instruct")
for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

conversation = [{"role": "user", "content": "Name three colours."}]
print(llm.chat(conversation, SamplingParams(temperature=0, max_tokens=48))[0].outputs[0].text)
