# The example shop, for docker-compose.yml: its worker, and `make demo`'s demonstration.

FROM python:3.12.8-slim-bookworm

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY celery_distlock ./celery_distlock
RUN pip install --no-cache-dir '.[demo]'

COPY examples /shop
WORKDIR /shop
ENV SHOP_DB=/data/shop.sqlite
RUN useradd shop && mkdir /data && chown shop /data
USER shop
RUN python -c "import os, books, make_orders; books.open_shop(os.environ['SHOP_DB'], *make_orders.load()).close()"
