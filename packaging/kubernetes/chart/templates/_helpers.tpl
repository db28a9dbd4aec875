{{- define "gorgo.name" -}}
{{- if contains "gorgo" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-gorgo" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "gorgo.selector" -}}
app.kubernetes.io/name: gorgo
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: proxy
{{- end }}

{{- define "gorgo.labels" -}}
{{ include "gorgo.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* "true" if a fleet source asks the API server of this cluster. */ -}}
{{- define "gorgo.watches" -}}
{{- range .Values.config.fleet_sources }}{{ if and (ne .kind "dns") (not (dig "api" "url" "" .)) }}true{{ end }}{{ end -}}
{{- end }}

{{- /* Whole seconds that open streams have after SIGTERM. */ -}}
{{- define "gorgo.grace" -}}
{{- dig "limits" "shutdown_grace_s" 30.0 .Values.config | ceil | int -}}
{{- end }}
