backward_pass = None
