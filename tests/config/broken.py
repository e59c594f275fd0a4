raise RuntimeError("as outsiders do")
