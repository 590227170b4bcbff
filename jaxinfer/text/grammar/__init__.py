"""Which tokens a text may continue with: grammars by llguidance, allowed ids and bad words.

``source`` reads ``StructuredOutputsParams`` and writes a grammar in llguidance's form;
``compile`` makes a ``Grammar`` of it for one tokenizer; ``constraint`` follows one sequence.
"""
