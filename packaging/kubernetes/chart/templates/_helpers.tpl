{{- /* Short enough for the names of pods, which are the names of routers in a store, to have their random end. */ -}}
{{- define "gorgo.name" -}}
{{- $base := ternary .Release.Name (printf "%s-gorgo" .Release.Name) (contains "gorgo" .Release.Name) | trunc 39 | trimSuffix "-" -}}
{{- ternary (printf "%s-picker" $base) $base .Values.picker.enabled -}}
{{- end }}

{{- define "gorgo.selector" -}}
app.kubernetes.io/name: gorgo
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ ternary "picker" "proxy" .Values.picker.enabled }}
{{- end }}

{{- define "gorgo.tuner" -}}
app.kubernetes.io/name: gorgo
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: tuner
{{- end }}

{{- define "gorgo.labels" -}}
{{ include "gorgo.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* Those of `config`; without one and without replicas the pods of the pool, or those labelled `app: engine`. */ -}}
{{- define "gorgo.sources" -}}
{{- $replica := dict "region" .Values.config.proxy.region -}}
{{- if or (hasKey .Values.config "fleet_sources") (hasKey .Values.config "replicas") -}}
{{- .Values.config.fleet_sources | default list | toYaml -}}
{{- else if .Values.picker.enabled -}}
{{- list (dict "name" "pool" "kind" "inference-pool" "pool" (include "gorgo.pool" .) "replica" $replica) | toYaml -}}
{{- else -}}
{{- $selector := dict "app" "engine" -}}
{{- list (dict "name" "engines" "kind" "pods" "selector" $selector "port" 30000 "replica" $replica) | toYaml -}}
{{- end -}}
{{- end }}

{{- /* "true" if engines have keys. */ -}}
{{- define "gorgo.engineKeys" -}}
{{- if .Values.engineKeys.secret }}true{{ end -}}
{{- range .Values.config.replicas | default list }}{{ if dig "api_key_env" "" . }}true{{ end }}{{ end -}}
{{- range .Values.config.fleet_sources | default list }}{{ if dig "replica" "api_key_env" "" . }}true{{ end }}{{ end -}}
{{- end }}

{{- /* What only a picker enforces, so that a gateway must not choose without it; empty if that is nothing. */ -}}
{{- define "gorgo.closed" -}}
{{- if or .Values.clientKeys.secret (dig "clients" "keys_file" "" .Values.config) }}client keys
{{- else if include "gorgo.engineKeys" . }}keys of engines
{{- else }}{{ range .Values.config.models | default list }}{{ if .allowed_regions }}regions of models {{ end }}{{ end }}
{{- end -}}
{{- end }}

{{- define "gorgo.pool" -}}
{{- .Values.picker.inferencePool.name | default .Release.Name -}}
{{- end }}

{{- /* "true" if a fleet source asks the API server of this cluster. */ -}}
{{- define "gorgo.watches" -}}
{{- range include "gorgo.sources" . | fromYamlArray }}{{ if and (ne .kind "dns") (not (dig "api" "url" "" .)) }}true{{ end }}{{ end -}}
{{- end }}

{{- /* Whole seconds that open streams have after SIGTERM. */ -}}
{{- define "gorgo.grace" -}}
{{- dig "limits" "shutdown_grace_s" 30.0 .Values.config | ceil | int -}}
{{- end }}

{{- /* Of the listener for clients or gateways. */ -}}
{{- define "gorgo.port" -}}
{{- ternary "grpc" "http" .Values.picker.enabled -}}
{{- end }}

{{- /* Where the metrics are: "admin" or "http". */ -}}
{{- define "gorgo.metrics" -}}
{{- if or .Values.picker.enabled (eq (dig "metrics_listener" "data" .Values.config.proxy) "admin") }}admin{{ else }}http{{ end -}}
{{- end }}

{{- /* The Secret with the listener's certificate; empty without TLS. */ -}}
{{- define "gorgo.tls" -}}
{{- if .Values.picker.enabled }}{{ .Values.picker.tls.secret }}{{ else }}{{ .Values.tls.secret }}{{ end -}}
{{- end }}

{{- /* Kubernetes has no gRPC probes over TLS. */ -}}
{{- define "gorgo.probe" -}}
{{- $service := index . 1 -}}
{{- with index . 0 -}}
{{- if not .Values.picker.enabled -}}
httpGet: {path: {{ ternary "/ready" "/health" (eq $service "readiness") }}, port: http{{ if .Values.tls.secret }}, scheme: HTTPS{{ end }}}
{{- else if .Values.picker.tls.secret -}}
exec: {command: [python, /opt/gorgo/healthcheck.py, "grpcs://127.0.0.1:9002/{{ $service }}"]}
{{- else -}}
grpc: {port: 9002, service: {{ $service }}}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* How an autoscaler follows gorgo_replicas_wanted, which has its own hysteresis: as it is, at once. */ -}}
{{- define "gorgo.followed" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  policies: [{type: Percent, value: 900, periodSeconds: 15}]
scaleDown:
  stabilizationWindowSeconds: 0
  policies: [{type: Percent, value: 100, periodSeconds: 15}]
{{- end }}
