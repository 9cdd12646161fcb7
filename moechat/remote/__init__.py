"""Models of other engines that speak OpenAI's protocol: vLLM, SGLang, llama.cpp, moechat itself."""
