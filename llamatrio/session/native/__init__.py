"""A model in this process: `backend` is the contract, `engine` computes, `libllama` is llama.h."""
