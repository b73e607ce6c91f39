"""python -m localllm"""

from localllm.cli import main

main()
