"""The page of `dcformer demo` as a Space; another model is one name away."""

from dcformer.demo import build_page, launch_options


page = build_page("dcformer-tiny")

if __name__ == "__main__":
    page.launch(**launch_options())
