"""`equipoise watch`: the page of runs, served with the values of the present moment."""
