"""Concurrent answers, printed as they grow."""

import asyncio

from jaxinfer import AsyncLLM, SamplingParams


async def show(llm: AsyncLLM, prompt: str) -> None:
    """Print one answer's length after each step, then its text."""
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24)):
        text = output.outputs[0].text
        print(f"{prompt[:12]:>12}: {len(text)} characters")
    print(f"{prompt}{text}\n")


async def main() -> None:
    """Two requests share every step."""
    llm = await AsyncLLM.create("smollm2-135m-instruct")
    await asyncio.gather(show(llm, "The capital of Japan is"), show(llm, "Water boils at"))
    await llm.shutdown()


asyncio.run(main())
