"""How people come in: command line, Gymnasium, report, watch."""
